"""For every test: leaks fail it, what the machine lacks skips it, and torch has one thread.

Tests marked `alone` or `lab` run last, with no other test beside them. Examples of hypothesis are few.
"""

import fcntl
import functools
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported: ranks are threads or processes already

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell started the tests in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)  # or the programs that they interrupt would not notice

hypothesis.settings.register_profile("evenly", max_examples=30, deadline=None, derandomize=True)
hypothesis.settings.load_profile("evenly")

SLOW = (  # long on a busy core; `make test-all` runs them
    "nodes/test_faults.py::test_a_program_that_ends_with_an_exchange_under_way_ends_by_its_own_error",
    "launch/test_world.py::test_the_missing_are_named_also_to_those_rank_0_left_behind",
    "launch/test_command.py::test_the_store_of_a_rehearsal_is_reached_from_this_machine_only",
    "layouts/test_layout.py::test_processes_with_other_hashes_find_the_same_layout",
    "session/test_resume.py::test_a_rank_that_hangs_is_named_at_the_time_limit_and_nobody_lingers",
    "survey/test_measure.py::test_a_network_is_cut_on_trial_as_memory_allows_it",
    "survey/test_measure.py::test_two_real_ranks_measure_and_plan",  # the command line's test does so, too
    "shards/test_properties.py::test_layers_may_have_shares_of_their_own_and_ranks_none",
    "shards/test_properties.py::test_any_layout_gives_the_same_numbers",  # random networks have random layouts, too
    "shards/test_moving.py::test_a_cut_along_the_batch_may_come_and_go",
    "shards/test_changes.py::test_changes_are_followed_one_after_another",
    "shards/test_moving.py::test_a_slower_rank_gets_fewer_units_of_every_layer",
    "shards/test_refusals.py::test_a_decoder_attends_to_what_was_encoded",
    "exchange/test_loaded_weights.py::test_cut_networks_load_too",
    "exchange/test_fuzz_exchanges.py::test_a_random_run_of_a_cut_network",
    "session/test_planning.py::test_batches_follow_no_further_than_memory_reaches",
    "session/test_planning.py::test_units_of_a_cut_network_follow_a_device_that_becomes_slow_and_the_losses_stay",
    "session/test_resume.py::test_other_settings_of_the_exchange_are_refused_inside_a_period",
    "session/test_resume.py::test_resumed_inside_a_period_bit_for_bit",  # with an exchange under way: in `make test`
    "calibration/test_corrections.py::test_a_rank_needs_less_by_itself_while_others_rest",
    "cli/test_measure.py::test_a_profile_is_kept_for_the_next_time",
    "launch/test_command.py::test_a_second_interruption_does_not_wait_for_what_does_not_listen",
    "launch/test_world.py::test_a_stopped_rank_0_is_told_within_the_time_limit",  # tests/session/test_stops.py, too
    "lab/test_ends.py::test_a_rank_that_ignores_sigterm_is_killed",
    "survey/test_measure.py::test_slow_ranks_measure_with_no_fewer_samples_than_a_network_takes",
    "launch/test_devices.py::test_each_rank_of_two_nodes_computes_on_its_device",
    "launch/test_devices.py::test_a_recipe_alone_says_how_to_start_several",
    "launch/test_terminal.py::test_ranks_of_mpirun_write_plain_text_into_a_file",
    "nodes/test_caught_errors.py::test_ranks_that_catch_the_error_end_with_their_own_code",
    "session/test_shards.py::test_state_of_a_factored_optimizer_is_averaged_as_by_hand",
    "golden/test_golden.py::test_losses_are_those_of_before",
    "test_docs.py::test_the_site_builds_without_a_warning",
    "test_examples.py::test_each_runs_alone_and_leaves_nothing",  # a complete one runs on three ranks in `make test`
    "test_examples.py::test_the_complete_script_by_hand_saves_weights_that_are_as_good_on_one_device",
    "test_examples.py::test_the_complete_script_stops_early_and_its_best_weights_are_as_good_on_one_device",
    "test_docs.py::test_what_is_marked_runs",  # all of it compiles in `make test`
    "recipes/tasks/test_training.py::test_a_generator_and_its_images",
    "recipes/data/test_cifar.py::test_the_real_things",
    "cli/test_doctor.py::test_this_machine_trains_and_every_line_is_ok_or_says_what_to_do",
    "shards/test_properties.py::test_any_network_trains_as_on_one_device",  # some of test_fuzz_networks.py do, too
    "shards/test_properties.py::test_dropout_does_not_depend_on_the_shares",
    "shards/test_recurrent.py::test_units_move_between_ranks_with_the_state_of_the_optimizer",
    "shards/test_zoo.py::test_gradients_reach_an_input_that_asks_for_them",
    "shards/test_zoo.py::test_a_rank_may_get_nothing_of_narrow_layers",
    "shards/test_zoo.py::test_the_example_may_be_named_arguments",
    "shards/test_zoo.py::test_sixteen_bit_messages_are_predicted_too",
    "launch/test_world.py::test_two_ranks_of_a_real_mpirun_open_the_world",
    "layouts/test_layout.py::test_the_same_network_gets_the_same_layout_and_both_can_be_told_as_text",
    "nodes/test_shards.py::test_layers_of_cut_networks_are_frozen_and_unfrozen",
    "graph/test_trace.py::test_batch_norm_of_an_exported_network",
    "graph/test_trace.py::test_an_exported_network_that_reads_what_its_normalization_counts",
    "nodes/test_shards.py::test_cut_networks_that_were_frozen_end_with_the_same_values",
    "planner/test_plan.py::test_a_node_of_a_hundred_ranks_is_planned_soon",
    "shards/test_networks.py::test_sequences_of_other_lengths_through_recurrent_layers",
    "shards/test_networks.py::test_dropout_between_recurrent_layers_does_not_depend_on_the_cut",
    "shards/test_state.py::test_torch_reads_the_checkpoints_and_they_come_back",  # and the other way in `make test`
    "test_tutorial.py::test_the_script_trains_on_two_unequal_nodes",  # so does an example
    "session/test_stragglers.py::test_a_slowed_rank_is_named_in_the_record_and_on_the_screen",
    "session/test_stops.py::test_a_stopped_host_of_the_store_is_named_and_all_end_in_time",
    "session/test_shards.py::test_a_run_that_crashed_resumes_bit_for_bit_and_with_other_shares",
    "planner/test_fewer.py::test_no_set_of_nodes_is_clearly_faster",
    "shards/test_networks.py::test_a_cut_network_runs_uncompiled_inside_of_a_compiled_function",
    "shards/test_networks.py::test_sequences_of_other_lengths_and_a_limit_of_traces",
    "shards/test_state.py::test_dropout_masks_go_on_where_they_were",
    "launch/test_command.py::test_two_ranks_and_one_run_as_two_nodes",  # test_one_failing_rank... starts as many
    "graph/test_refused.py::test_only_our_error_is_said",
    "session/test_planning.py::test_a_measurement_becomes_a_plan_that_trains",  # the report's test does so, too
    "shards/test_recurrent.py::test_layers_with_dropout_between_them_and_states_that_go_on",
    "shards/test_recurrent.py::test_other_lengths_keep_the_way_of_the_example",
)
# Of tests with many cases `make test` runs these, or every second, third, ... of them; `make test-all` runs the others.
SAMPLED: dict[str, tuple[str, ...] | int] = {
    "graph/test_trace.py::test_encoders_whose_layers_torch_would_fuse_in_evaluation": ("0.0-0", "0.1-0"),
    "graph/test_trace.py::test_tracing_leaves_the_network_as_it_is": ("resnet18",),
    "checkpoints/test_export.py::test_an_exported_run_is_what_agreed_shows": (
        "whole-{'every': 2, 'overlap': 2}", "cut-{'every': 3}"),
    "launch/test_command.py::test_an_interruption_ends_all": ("2-130",),
    "launch/test_devices.py::test_a_gpu_that_is_not_there_starts_nothing": ("words0",),
    "exchange/test_buffers.py::test_buffers_of_cut_networks": ("2|whole", "left out|2"),
    "nodes/test_exactness.py::test_every_step_equals_global_data_parallel": ("2x2-momentum", "1+1+2-sgd"),
    "nodes/test_exactness.py::test_parameters_and_buffers_after_every_step": (
        "2x2-sgd-1", "3+1-adam-2", "1+1+2-momentum-1", "3+1-rmsprop-1", "2x2-adamw-5"),
    "exchange/test_loaded_weights.py::test_all_ranks_load_the_same": ("plain-4", "overlap-3", "outer-4", "fragments-5"),
    "exchange/test_overlap.py::test_codes_leave_all_nodes_with_the_same_bits": ("2x2-int4", "3+1-bf16", "1+1+2-int8"),
    "exchange/test_overlap.py::test_optimizer_state": ("average-2", "reset-0", "policy2-0", "policy3-2"),
    "exchange/test_overlap.py::test_overlap": ("3+1-1", "2x2-2", "1+1+2-4"),
    "exchange/test_overlap.py::test_fragments": ("3+1-1-3", "2x2-0-2", "3+1-3-2"),
    "nodes/test_shards.py::test_exchanges_of_cut_networks_beside_the_training": (
        "2|whole-exchange2",),
    "nodes/test_shards.py::test_two_nodes_with_different_splits": ("adam-5",),
    "nodes/test_shards.py::test_whole_networks_ranks_without_a_share_and_three_nodes": ("left out|2",),
    "nodes/test_shards.py::test_unequal_numbers_of_steps_are_told": ("4",),
    "nodes/test_shards.py::test_nan_in_one_part_stops_all": ("3|2",),
    "exchange/test_overlap.py::test_state_of_fragments": ("policy1",),
    "recipes/optim/test_training.py::test_a_resumed_run_ends_bit_for_bit_as_one_without_a_stop": ("adafactor-whole",),
    "cli/test_completion.py::test_a_shell_completes_verbs_recipes_and_runs": ("bash",),
    "shards/test_zoo.py::test_more_steps_and_another_optimizer": ("4-three",),
    "nodes/test_freezing.py::test_every_step_equals_the_reference": (
        "there and back-3", "another part-3", "group added-3", "group added-global"),
    "nodes/test_freezing.py::test_all_nodes_end_with_the_same_bits": (
        "there and back-outer", "there and back-fragments", "group added-codec", "group added-averaged"),
    "nodes/test_shards.py::test_several_replicas_in_a_node": ("2+2-adam-2",),
    "nodes/test_shards.py::test_codes_of_cut_networks_end_in_the_same_values_everywhere": ("int4",),
    "nodes/test_faults.py::test_a_rank_that_never_arrives_is_named_at_the_time_limit": ("1",),
    "schedule/test_adaptive.py::test_all_ranks_choose_the_same": ("wish0-0", "wish1-2", "wish2-2"),
    "session/test_planning.py::test_a_run_with_ranks_left_out_goes_on_from_its_checkpoint": ("False",),
    "session/test_early_ends.py::test_a_loop_left_early_ends_the_run_like_its_last_epoch": ("break",),
    "session/test_freezing.py::test_a_run_that_does_not_repeat_its_changes_is_refused": (
        "settings0-was trained, but it is frozen here",),
    "session/test_weights.py::test_the_best_checkpoint_stays_and_is_exported": ("cut",),
    "session/test_resume.py::test_a_failing_rank_ends_all_at_once": ("raise-2", "kill-0"),
    "session/test_verifying.py::test_replicas_that_are_cut_differently_are_compared_each_and_train_as_without": (
        "float64",),
    "session/test_resume.py::test_resumed_with_an_exchange_under_way_bit_for_bit": ("exchange0",),
    "shards/test_around_forward.py::test_checkpoints_and_hooks_of_saved_tensors": ("Recurrent-units",),
    "shards/test_fuzz_networks.py::test_a_strange_network_is_exact_or_refused": tuple(map(str, range(6))),
    "shards/test_moving.py::test_any_optimizer_state_moves_with_its_units": ("adam-adam",),
    "shards/test_moving.py::test_training_goes_on_as_on_one_device": ("lstm",),
    "shards/test_networks.py::test_gradients_of_gradients": (
        "shares1-NormAct", "shares1-GroupNorm of one group"),
    "shards/test_networks.py::test_images_of_other_sizes": ("False",),
    "shards/test_networks.py::test_random_numbers_do_not_depend_on_the_cut": (
        "stochastic depth", "bernoulli", "a module that cannot be traced"),
    "shards/test_networks.py::test_recurrent_layers_are_cut_along_the_batch": (
        "False-GRU of both directions",),
    "shards/test_probe.py::test_elementwise_optimizers_pass": 5,
    "shards/test_parameters.py::test_what_treats_each_element_alone_gives_the_numbers_of_one_device": 3,
    "shards/test_loops.py::test_a_loop_does_the_same": 2,
    "shards/test_guard.py::test_what_treats_each_element_alone_works_as_ever": 3,
    "shards/test_guard.py::test_what_looks_at_several_elements_is_refused": 3,
    "shards/test_guard.py::test_torchs_clipping_gives_the_numbers_of_one_device": 3,
    "shards/test_attacks.py::test_a_cut_network_is_exact_or_refuses": 2,
    "shards/test_own_code.py::test_code_that_is_put_in_place_of_torchs_runs": 2,
    "shards/test_refusals.py::test_it_is_computed_as_it_is": 2,
    "shards/test_verify.py::test_a_parameter_that_one_rank_has_changed_is_named": 3,
    "shards/test_state.py::test_counts_of_steps_are_kept_in_either_form": 2,
    "session/test_shards.py::test_a_cut_network_trains_as_on_one_device": 2,
    "session/test_verifying.py::test_a_run_is_the_same_to_the_last_bit": 2,
    "gradients/test_not_averaged.py::test_ranks_of_a_node_that_hold_different_parameters_are_named": 3,
    "shards/test_recurrent.py::test_units_are_computed_by_the_rank_that_holds_them": (
        "LSTM of both directions, given states",),
    "shards/test_recurrent.py::test_ranks_without_units_or_without_a_share": ("shares0",),
    "shards/test_state.py::test_training_goes_on_in_another_split_and_in_plain_torch": (
        "small-adam-adam",),
    "shards/test_verify.py::test_networks_that_are_cut_are_the_same": ("small-3", "gpt2_separate_tied-2"),
    "shards/test_verify.py::test_a_gather_with_the_wrong_way_back_is_named": ("small", "small32"),
    "shards/test_zoo.py::test_a_network_trains_as_on_one_device": ("resnet18",),
}  # fmt: skip
PATIENCE_S = 2.0  # for threads that are about to end
OF_OTHERS = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # pytest's, and torch's when it first loads its compiler
CACHES = {"__pycache__", ".hypothesis", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".import_linter_cache"}


@pytest.fixture(autouse=True)
def _fail_what_leaks() -> Iterator[None]:
    environ, folder = _environ(), Path.cwd()
    threads, files = set(threading.enumerate()), _files(folder)
    yield
    leaks = [
        *(f"variable {name}" for name in sorted({name for name, _ in _environ().items() ^ environ.items()})),
        *(f"thread {thread.name}" for thread in _threads_left(threads)),
        *(f"file {name}" for name in sorted(_files(folder) - files)),
        *(["an open default process group"] if _close_group() else []),
    ]
    for name in _environ().keys() | environ.keys():  # the next test is not to blame
        os.environ.pop(name, None)
    os.environ.update(environ)
    assert not leaks, f"the test left behind: {', '.join(leaks)}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Lets each process of `-n` import its part of the test files first, then all collect all of them.

    All would rewrite the assertions of the same file at the same time. Now one does, and the others read what it wrote.
    """
    worker = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    root = Path(__file__).parents[1]
    folders = [folder for folder in map(root.joinpath, session.config.args) if folder.is_dir()]
    files = sorted({file for folder in folders for file in folder.rglob("test_*.py")})
    for file in files[int(worker["workerid"].removeprefix("gw")) :: worker["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # is told when it is collected
            importlib.import_module(".".join(file.relative_to(root).with_suffix("").parts))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what takes long, and puts what runs with no other test beside it to the end.

    Tests of examples and documentation come first: they take longest, and would keep the others waiting at the end.
    """
    items.sort(key=lambda item: (_runs_alone(item), item.path.parent != Path(__file__).parent))
    cases: dict[str, set[str]] = {}
    for item in items:
        name, _, case = item.nodeid.removeprefix("tests/").partition("[")
        case, kept = case.removesuffix("]"), SAMPLED.get(name, 1)
        is_kept = case in kept if isinstance(kept, tuple) else len(cases.get(name, ())) % kept == 0
        cases.setdefault(name, set()).add(case)
        if name in SLOW or not is_kept:
            item.add_marker(pytest.mark.slow)
        if item.get_closest_marker("slow") is not None and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(600))  # some need a minute of processor time, of which others take most
    if not any("::" in word for word in config.args):
        _require_known(cases)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the time limit: to wait for one's turn does not count
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Lets tests run side by side in several processes, but those by themselves that need it."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if _runs_alone(item) else fcntl.LOCK_SH)
        try:
            return (yield)
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also of processes that the test has forked


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips a test that this machine cannot run, saying what is missing."""
    lack = None
    if item.get_closest_marker("lab") is not None:
        lack = _lab_lacks()
    if item.get_closest_marker("gpu") is not None:
        lack = lack or _gpu_lacks()
    if lack is not None:
        pytest.skip(lack)


def _require_known(cases: dict[str, set[str]]) -> None:
    """Refuses lists that name what is not there: a test that was renamed would run always, or never."""
    files = {name.partition("::")[0] for name in cases}
    listed = {name: kept for name, kept in SAMPLED.items() if isinstance(kept, tuple)}
    for name, kept in (*((name, ()) for name in {*SLOW, *SAMPLED} - listed.keys()), *listed.items()):
        file = name.partition("::")[0]
        is_known = (Path(__file__).parent / file).exists()
        if not is_known or (file in files and (name not in cases or not set(kept) <= cases[name])):
            raise pytest.UsageError(f"tests/conftest.py names {name} {kept}, and of those some are not there.")


def _runs_alone(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) is not None for name in ("lab", "alone"))


@functools.cache
def _lab_lacks() -> str | None:
    from evenly.lab import missing

    return missing()


@functools.cache
def _gpu_lacks() -> str | None:
    import torch

    return None if torch.cuda.is_available() else "The test needs a CUDA device, and torch sees none."


def _environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in OF_OTHERS}


def _files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - CACHES


def _threads_left(before: set[threading.Thread]) -> list[threading.Thread]:
    deadline = time.monotonic() + PATIENCE_S
    while left := [thread for thread in set(threading.enumerate()) - before if _counts(thread)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.01)
    return []


def _counts(thread: threading.Thread) -> bool:
    return not thread.daemon or thread.name.startswith("evenly-")


def _close_group() -> bool:
    """Returns whether torch's default group was open, and closes it; a test without torch does not import it."""
    if "torch.distributed" not in sys.modules:
        return False
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return False
    dist.destroy_process_group()
    return True
