#!/bin/sh
# Installs the system packages that the demo, the lab and some tests use, where they are missing and this user may.
set -eu

wanted=""
[ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] || wanted="$wanted dataset-fashion-mnist"
if [ "$(uname)" = Linux ]; then
    command -v ip >/dev/null 2>&1 && command -v tc >/dev/null 2>&1 || wanted="$wanted iproute2"
    command -v nsenter >/dev/null 2>&1 && command -v unshare >/dev/null 2>&1 || wanted="$wanted util-linux"
fi
[ -n "$wanted" ] || exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "installing$wanted"
    apt-get update -qq
    # shellcheck disable=SC2086  # one word per package
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $wanted >/dev/null
else
    echo "missing:$wanted. As root on Debian or Ubuntu: apt-get install$wanted."
    echo "Elsewhere put Fashion-MNIST's four idx files into a folder and pass it with --data. Going on without."
fi
