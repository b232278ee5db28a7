"""Whole networks in the styles people write them, and `ZOO`: each at its true depth, narrow, on small inputs.

Only a second style of one architecture (GPT-2 without a loss, with other attention, as nanoGPT; ViT of modules) has few
blocks: what is new there is in each of them.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

Norm = Callable[[int], nn.Module]


def he_init(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")


class VGG16(nn.Module):
    PLAN: tuple[int | str, ...] = (1, 1, "M", 2, 2, "M", 4, 4, 4, "M", 8, 8, 8, "M", 8, 8, 8, "M")

    def __init__(
        self,
        classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
        pool: int = 7,
        batch_norm: bool = False,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for step in self.PLAN:
            if isinstance(step, str):
                layers.append(nn.MaxPool2d(kernel_size=2, stride=2))
                continue
            layers.append(nn.Conv2d(channels, step * width, kernel_size=3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(step * width))
            layers.append(nn.ReLU(inplace=True))
            channels = step * width
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((pool, pool))
        self.classifier = nn.Sequential(
            nn.Linear(channels * pool * pool, hidden),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(hidden, hidden),
            nn.ReLU(True),
            nn.Dropout(p=dropout),
            nn.Linear(hidden, classes),
        )
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        return self.classifier(x)


def conv3x3(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, groups=groups, bias=False)


def conv1x1(inputs: int, outputs: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False)


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.avgpool(x)
        scale = F.silu(self.fc1(scale))
        scale = torch.sigmoid(self.fc2(scale))
        return x * scale


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(
        self, inputs: int, planes: int, width: int, stride: int, groups: int, norm: Norm, reduction: int | None
    ) -> None:
        super().__init__()
        self.conv1 = conv3x3(inputs, width, stride, groups)
        self.bn1 = norm(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = conv3x3(width, planes)
        self.bn2 = norm(planes)
        self.se = SqueezeExcite(planes, planes // reduction) if reduction else None
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != planes:
            self.downsample = nn.Sequential(conv1x1(inputs, planes, stride), norm(planes))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.se is not None:
            out = self.se(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(
        self, inputs: int, planes: int, width: int, stride: int, groups: int, norm: Norm, reduction: int | None
    ) -> None:
        super().__init__()
        outputs = planes * self.expansion
        self.conv1 = conv1x1(inputs, width)
        self.bn1 = norm(width)
        self.conv2 = conv3x3(width, width, stride, groups)
        self.bn2 = norm(width)
        self.conv3 = conv1x1(width, outputs)
        self.bn3 = norm(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.se = SqueezeExcite(outputs, outputs // reduction) if reduction else None
        self.downsample: nn.Module | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(conv1x1(inputs, outputs, stride), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.se is not None:
            out = self.se(out)
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        layers: Sequence[int],
        classes: int = 1000,
        base: int = 64,
        groups: int = 1,
        group_width: int | None = None,
        norm: Norm = nn.BatchNorm2d,
        reduction: int | None = None,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, base, kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = norm(base)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = base
        stages: list[nn.Module] = []
        for stage, count in enumerate(layers):
            planes = base * 2**stage
            width = (group_width or base) * groups * 2**stage
            blocks: list[nn.Module] = []
            for index in range(count):
                stride = 2 if stage and not index else 1
                blocks.append(block(channels, planes, width, stride, groups, norm, reduction))
                channels = planes * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = torch.flatten(self.avgpool(x), 1)
        return self.fc(x)


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, neck: int, drop_rate: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(inputs, neck * growth, kernel_size=1, stride=1, bias=False)
        self.norm2 = nn.BatchNorm2d(neck * growth)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(neck * growth, growth, kernel_size=3, stride=1, padding=1, bias=False)
        self.drop_rate = float(drop_rate)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(self.relu1(self.norm1(x)))
        x = self.conv2(self.relu2(self.norm2(x)))
        if self.drop_rate > 0:
            x = F.dropout(x, p=self.drop_rate, training=self.training)
        return x


class DenseBlock(nn.ModuleDict):
    def __init__(self, count: int, inputs: int, growth: int, neck: int, drop_rate: float) -> None:
        super().__init__()
        for index in range(count):
            layer = DenseLayer(inputs + index * growth, growth, neck, drop_rate)
            self.add_module(f"denselayer{index + 1}", layer)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for _, layer in self.items():
            features.append(layer(features))
        return torch.cat(features, 1)


class Transition(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(inputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=1, stride=1, bias=False)
        self.pool = nn.AvgPool2d(kernel_size=2, stride=2)


class DenseNet(nn.Module):
    def __init__(
        self,
        classes: int = 1000,
        growth: int = 32,
        blocks: Sequence[int] = (6, 12, 24, 16),
        first: int = 64,
        neck: int = 4,
        drop_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            OrderedDict[str, nn.Module](
                conv0=nn.Conv2d(3, first, kernel_size=7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(first),
                relu0=nn.ReLU(inplace=True),
                pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        )
        channels = first
        for index, count in enumerate(blocks, start=1):
            self.features.add_module(f"denseblock{index}", DenseBlock(count, channels, growth, neck, drop_rate))
            channels += count * growth
            if index < len(blocks):
                self.features.add_module(f"transition{index}", Transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        out = F.relu(features, inplace=True)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


class ConvBNReLU6(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = inputs * expand
        self.use_res_connect = stride == 1 and inputs == outputs
        layers: list[nn.Module] = []
        if expand != 1:
            layers.append(ConvBNReLU6(inputs, hidden, kernel=1))
        layers += [
            ConvBNReLU6(hidden, hidden, stride=stride, groups=hidden),
            nn.Conv2d(hidden, outputs, 1, 1, 0, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        if self.use_res_connect:
            return x + self.conv(x)
        return self.conv(x)


class MobileNetV2(nn.Module):
    # expansion, channels, blocks, stride of the first
    PLAN = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(
        self, classes: int = 1000, width_mult: float = 1.0, round_to: int = 8, last: int = 1280, dropout: float = 0.2
    ) -> None:
        super().__init__()

        def scaled(channels: int) -> int:
            return max(round_to, int(channels * width_mult + round_to / 2) // round_to * round_to)

        channels = scaled(32)
        features: list[nn.Module] = [ConvBNReLU6(3, channels, stride=2)]
        for expand, outputs, count, first in self.PLAN:
            for index in range(count):
                features.append(InvertedResidual(channels, scaled(outputs), 1 if index else first, expand))
                channels = scaled(outputs)
        features.append(ConvBNReLU6(channels, last, kernel=1))
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = F.adaptive_avg_pool2d(x, (1, 1)).reshape(x.shape[0], -1)
        return self.classifier(x)


class Residual(nn.Module):
    def __init__(self, fn: nn.Module) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


def conv_mixer(dim: int = 256, depth: int = 8, kernel: int = 5, patch: int = 2, classes: int = 10) -> nn.Sequential:
    def mixer() -> nn.Sequential:
        depthwise = nn.Conv2d(dim, dim, kernel, groups=dim, padding="same")
        return nn.Sequential(
            Residual(nn.Sequential(depthwise, nn.GELU(), nn.BatchNorm2d(dim))),
            nn.Conv2d(dim, dim, kernel_size=1),
            nn.GELU(),
            nn.BatchNorm2d(dim),
        )

    return nn.Sequential(
        nn.Conv2d(3, dim, kernel_size=patch, stride=patch),
        nn.GELU(),
        nn.BatchNorm2d(dim),
        *[mixer() for _ in range(depth)],
        nn.AdaptiveAvgPool2d((1, 1)),
        nn.Flatten(),
        nn.Linear(dim, classes),
    )


class DoubleConv(nn.Sequential):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        )


class Up(nn.Module):
    def __init__(self, inputs: int, outputs: int, upsample: str | None) -> None:
        super().__init__()
        self.up: nn.Module
        if upsample is None:
            self.up = nn.ConvTranspose2d(inputs, outputs, kernel_size=2, stride=2)
        else:
            corners = True if upsample == "bilinear" else None
            self.up = nn.Sequential(
                nn.Upsample(scale_factor=2, mode=upsample, align_corners=corners),
                nn.Conv2d(inputs, outputs, kernel_size=1),
            )
        self.conv = DoubleConv(2 * outputs, outputs)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv(torch.cat([skip, self.up(x)], dim=1))


class UNet(nn.Module):
    def __init__(self, classes: int = 2, base: int = 64, depth: int = 4, upsample: str | None = None) -> None:
        super().__init__()
        widths = [base * 2**level for level in range(depth + 1)]
        self.inc = DoubleConv(3, base)
        self.pool = nn.MaxPool2d(2)
        self.downs = nn.ModuleList([DoubleConv(a, b) for a, b in pairwise(widths)])
        self.ups = nn.ModuleList([Up(b, a, upsample) for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True)])
        self.outc = nn.Conv2d(base, classes, kernel_size=1)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inc(x)
        skips = []
        for down in self.downs:
            skips.append(x)
            x = down(self.pool(x))
        for up in self.ups:
            x = up(x, skips.pop())
        return self.outc(x)


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, dim)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.fc1(x)))
        return self.drop(self.fc2(x))


class ModuleAttentionBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(dim)
        self.self_attention = nn.MultiheadAttention(dim, heads, dropout=dropout, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.ln_2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden, dropout)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.ln_1(inputs)
        x, _ = self.self_attention(x, x, x, need_weights=False)
        x = self.dropout(x) + inputs
        return x + self.mlp(self.ln_2(x))


class FusedAttention(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        x = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        x = x.transpose(1, 2).reshape(b, n, c)
        return F.dropout(self.proj(x), p=self.dropout, training=self.training)


class FusedAttentionBlock(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = FusedAttention(dim, heads, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(
        self,
        block: type[ModuleAttentionBlock] | type[FusedAttentionBlock],
        image: int = 224,
        patch: int = 16,
        dim: int = 384,
        depth: int = 12,
        heads: int = 6,
        classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.cls_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, (image // patch) ** 2 + 1, dim) * 0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*[block(dim, heads, 4 * dim, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        cls = self.cls_token.expand(x.shape[0], -1, -1)
        x = torch.cat((cls, x), dim=1)
        x = self.drop(x + self.pos_embed)
        x = self.norm(self.blocks(x))
        return self.head(x[:, 0])


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = 50257
    context: int = 1024
    layers: int = 12
    heads: int = 12
    kv_heads: int = 12
    dim: int = 768
    dropout: float = 0.0
    bias: bool = True
    fused: bool = True
    tied: bool = False
    init_std: float = 0.02


class RepeatedKVAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.n_head, self.n_kv = config.heads, config.kv_heads
        self.head_dim = config.dim // config.heads
        self.q_size, self.kv_size = self.n_head * self.head_dim, self.n_kv * self.head_dim
        self.c_attn = nn.Linear(config.dim, self.q_size + 2 * self.kv_size, bias=config.bias)
        self.c_proj = nn.Linear(config.dim, config.dim, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()  # noqa: N806
        q, k, v = self.c_attn(x).split([self.q_size, self.kv_size, self.kv_size], dim=2)
        q = q.view(B, T, self.n_head, self.head_dim).transpose(1, 2)
        k = k.view(B, T, self.n_kv, self.head_dim).transpose(1, 2)
        v = v.view(B, T, self.n_kv, self.head_dim).transpose(1, 2)
        k = k.repeat_interleave(self.n_head // self.n_kv, dim=1)
        v = v.repeat_interleave(self.n_head // self.n_kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class GroupedQueryAttention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.dim // config.heads
        self.q_proj = nn.Linear(config.dim, config.heads * self.head_dim, bias=config.bias)
        self.kv_proj = nn.Linear(config.dim, 2 * config.kv_heads * self.head_dim, bias=config.bias)
        self.o_proj = nn.Linear(config.heads * self.head_dim, config.dim, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        k, v = self.kv_proj(x).chunk(2, dim=-1)
        q = self.q_proj(x).view(b, t, -1, self.head_dim).transpose(1, 2)
        k = k.view(b, t, -1, self.head_dim).transpose(1, 2)
        v = v.view(b, t, -1, self.head_dim).transpose(1, 2)
        dropout_p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=True, enable_gqa=True)
        y = self.o_proj(y.transpose(1, 2).flatten(2))
        return F.dropout(y, p=self.dropout, training=self.training)


class GPTBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.dim, bias=config.bias)
        self.attn = RepeatedKVAttention(config) if config.fused else GroupedQueryAttention(config)
        self.ln_2 = nn.LayerNorm(config.dim, bias=config.bias)
        self.mlp = MLP(config.dim, 4 * config.dim, config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_emb = nn.Embedding(config.vocab, config.dim)
        self.pos_emb = nn.Parameter(torch.randn(1, config.context, config.dim) * config.init_std)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.Sequential(*[GPTBlock(config) for _ in range(config.layers)])
        self.ln_f = nn.LayerNorm(config.dim, bias=config.bias)
        self.head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.tok_emb.weight
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, mean=0.0, std=self.config.init_std)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        t = idx.size(1)
        x = self.drop(self.tok_emb(idx) + self.pos_emb[:, :t, :])
        logits = self.head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


class NanoGPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab, config.dim),
                "wpe": nn.Embedding(config.context, config.dim),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList([GPTBlock(config) for _ in range(config.layers)]),
                "ln_f": nn.LayerNorm(config.dim, bias=config.bias),
            }
        )
        self.lm_head = nn.Linear(config.dim, config.vocab, bias=False)
        if config.tied:
            self.transformer.wte.weight = self.lm_head.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, mean=0.0, std=config.init_std)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        _, t = idx.size()
        assert t <= self.config.context, f"{t} tokens, but the context has {self.config.context}"
        pos = torch.arange(0, t, dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        if targets is None:
            return logits
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int, layer_scale: float) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = nn.LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(layer_scale * torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x)
        y = y.permute(0, 2, 3, 1)
        y = self.pwconv2(self.act(self.pwconv1(self.norm(y))))
        y = self.gamma * y
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(
        self,
        depths: Sequence[int] = (3, 3, 27, 3),
        base: int = 96,
        patch: int = 4,
        classes: int = 1000,
        layer_scale: float = 1e-6,
    ) -> None:
        super().__init__()
        dims = [base * 2**stage for stage in range(len(depths))]
        stages: list[nn.Module] = [nn.Conv2d(3, base, kernel_size=patch, stride=patch), LayerNorm2d(base, eps=1e-6)]
        for stage, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            if stage:
                stages += [LayerNorm2d(dims[stage - 1], eps=1e-6), nn.Conv2d(dims[stage - 1], dim, 2, stride=2)]
            stages.append(nn.Sequential(*[ConvNeXtBlock(dim, layer_scale) for _ in range(depth)]))
        self.features = nn.Sequential(*stages)
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6)
        self.head = nn.Linear(dims[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        return self.head(self.norm(x.mean([-2, -1])))


class MixerBlock(nn.Module):
    def __init__(self, dim: int, tokens: int, token_hidden: int, channel_hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.mlp_tokens = MLP(tokens, token_hidden, dropout)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp_channels = MLP(dim, channel_hidden, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class MLPMixer(nn.Module):
    def __init__(
        self,
        image: int = 224,
        patch: int = 16,
        dim: int = 512,
        depth: int = 8,
        token_hidden: int = 256,
        channel_hidden: int = 2048,
        classes: int = 1000,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        tokens = (image // patch) ** 2
        self.stem = nn.Conv2d(3, dim, kernel_size=patch, stride=patch)
        self.blocks = nn.Sequential(
            *[MixerBlock(dim, tokens, token_hidden, channel_hidden, dropout) for _ in range(depth)]
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = self.norm(self.blocks(x))
        return self.head(x.mean(dim=1))


class WideConvNet(nn.Module):
    def __init__(self, classes: int = 10, widths: Sequence[int] = (512, 768, 1024), dropout: float = 0.0) -> None:
        super().__init__()
        a, b, c = widths
        self.conv1 = nn.Conv2d(3, a, 5, padding=2)
        self.conv2 = nn.Conv2d(a, b, 3, padding="valid")
        self.conv3 = nn.Conv2d(b, c, (3, 1), stride=(2, 1), padding=(1, 0))
        self.conv4 = nn.Conv2d(c, c, 3, dilation=2, padding=2)
        self.drop = nn.Dropout2d(dropout)
        self.fc = nn.Linear(c, classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.leaky_relu(self.conv2(x), 0.1)
        x = F.avg_pool2d(F.silu(self.conv3(x)), kernel_size=3, stride=2, padding=1)
        x = self.drop(F.relu(self.conv4(x)))
        x = x.mean(dim=(2, 3))
        return F.log_softmax(self.fc(x), dim=1)


class BasicConv2d(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class InceptionBlock(nn.Module):
    def __init__(self, inputs: int, one: int, three: tuple[int, int], five: tuple[int, int], pool: int) -> None:
        super().__init__()
        self.branch1 = BasicConv2d(inputs, one, 1)
        self.branch2 = nn.Sequential(BasicConv2d(inputs, three[0], 1), BasicConv2d(*three, kernel=3, padding=1))
        self.branch3 = nn.Sequential(BasicConv2d(inputs, five[0], 1), BasicConv2d(*five, kernel=5, padding=2))
        self.branch4 = nn.Sequential(
            nn.MaxPool2d(kernel_size=3, stride=1, padding=1, ceil_mode=True), BasicConv2d(inputs, pool, 1)
        )
        self.outputs = one + three[1] + five[1] + pool

    def forward(self, x: Tensor) -> Tensor:
        branches = [self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)]
        return torch.cat(branches, 1)


class GoogLeNet(nn.Module):
    # 1x1; 3x3 reduced, 3x3; 5x5 reduced, 5x5; pool
    PLAN: tuple[tuple[int, ...] | None, ...] = (
        (64, 96, 128, 16, 32, 32),
        (128, 128, 192, 32, 96, 64),
        None,
        (192, 96, 208, 16, 48, 64),
        (160, 112, 224, 24, 64, 64),
        (128, 128, 256, 24, 64, 64),
        (112, 144, 288, 32, 64, 64),
        (256, 160, 320, 32, 128, 128),
        None,
        (256, 160, 320, 32, 128, 128),
        (384, 192, 384, 48, 128, 128),
    )

    def __init__(self, classes: int = 1000, divide: int = 1, dropout: float = 0.2) -> None:
        super().__init__()
        channels = 192 // divide
        self.stem = nn.Sequential(
            BasicConv2d(3, 64 // divide, 7, stride=2, padding=3),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            BasicConv2d(64 // divide, 64 // divide, 1),
            BasicConv2d(64 // divide, channels, 3, padding=1),
        )
        layers: list[nn.Module] = []
        for row in self.PLAN:
            if row is None:
                layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
                continue
            one, a, b, c, d, pool = (width // divide for width in row)
            block = InceptionBlock(channels, one, (a, b), (c, d), pool)
            layers.append(block)
            channels = block.outputs
        self.blocks = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(channels, classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.fc(self.dropout(x))


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    b, c, h, w = x.size()
    x = x.view(b, groups, c // groups, h, w)
    x = torch.transpose(x, 1, 2).contiguous()
    return x.view(b, c, h, w)


class ShuffleUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        half = outputs // 2
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(
                nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
                nn.BatchNorm2d(inputs),
                nn.Conv2d(inputs, half, 1, bias=False),
                nn.BatchNorm2d(half),
                nn.ReLU(inplace=True),
            )
        self.branch2 = nn.Sequential(
            nn.Conv2d(inputs if stride > 1 else half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
            nn.Conv2d(half, half, 3, stride, 1, groups=half, bias=False),
            nn.BatchNorm2d(half),
            nn.Conv2d(half, half, 1, bias=False),
            nn.BatchNorm2d(half),
            nn.ReLU(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        return channel_shuffle(out, 2)


class ShuffleNetV2(nn.Module):
    def __init__(
        self,
        classes: int = 1000,
        repeats: Sequence[int] = (4, 8, 4),
        widths: Sequence[int] = (24, 116, 232, 464, 1024),
    ) -> None:
        super().__init__()
        first, *middle, last = widths
        self.conv1 = nn.Sequential(
            nn.Conv2d(3, first, 3, 2, 1, bias=False), nn.BatchNorm2d(first), nn.ReLU(inplace=True)
        )
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        channels = first
        for index, (count, width) in enumerate(zip(repeats, middle, strict=True), start=2):
            units = [ShuffleUnit(channels, width, 2), *[ShuffleUnit(width, width, 1) for _ in range(count - 1)]]
            setattr(self, f"stage{index}", nn.Sequential(*units))
            channels = width
        self.conv5 = nn.Sequential(
            nn.Conv2d(channels, last, 1, bias=False), nn.BatchNorm2d(last), nn.ReLU(inplace=True)
        )
        self.fc = nn.Linear(last, classes)
        he_init(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.conv1(x))
        x = self.stage4(self.stage3(self.stage2(x)))
        x = self.conv5(x).mean([2, 3])
        return self.fc(x)


class LSTMClassifier(nn.Module):
    def __init__(
        self,
        vocab: int = 10000,
        embed: int = 128,
        hidden: int = 256,
        layers: int = 2,
        classes: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed, padding_idx=0)
        self.lstm = nn.LSTM(embed, hidden, num_layers=layers, batch_first=True, dropout=dropout)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.dropout(self.embedding(tokens))
        _, (hidden, _) = self.lstm(embedded)
        return self.fc(self.dropout(hidden[-1]))


class GRUClassifier(nn.Module):
    def __init__(
        self,
        vocab: int = 10000,
        embed: int = 128,
        hidden: int = 256,
        layers: int = 2,
        classes: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, embed)
        self.gru = nn.GRU(embed, hidden, layers, batch_first=True, bidirectional=True, dropout=dropout)
        self.fc = nn.Linear(2 * hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        output, _ = self.gru(self.embedding(tokens))
        return self.fc(output.mean(dim=1))


class SuperResolution(nn.Module):
    def __init__(self, scale: int = 4, channels: int = 64, blocks: int = 16) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, channels, 3, padding=1)
        self.body = nn.Sequential(
            *[
                Residual(
                    nn.Sequential(
                        nn.Conv2d(channels, channels, 3, padding=1),
                        nn.PReLU(channels),
                        nn.Conv2d(channels, channels, 3, padding=1),
                    )
                )
                for _ in range(blocks)
            ]
        )
        tail: list[nn.Module] = []
        for _ in range(scale.bit_length() - 1):
            tail += [nn.Conv2d(channels, channels * 4, 3, padding=1), nn.PixelShuffle(2), nn.PReLU()]
        self.tail = nn.Sequential(*tail, nn.Conv2d(channels, 3, 3, padding=1))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        features = self.head(x)
        features = features + self.body(features)
        return self.tail(features) + F.interpolate(x, scale_factor=self.scale, mode="bilinear", align_corners=False)


class Autoencoder1d(nn.Module):
    def __init__(self, channels: int = 2, width: int = 32) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv1d(channels, width, kernel_size=7, stride=2, padding=3),
            nn.ELU(),
            nn.Conv1d(width, 2 * width, kernel_size=5, stride=2, padding=2, bias=False),
            nn.BatchNorm1d(2 * width),
            nn.ELU(),
            nn.Conv1d(2 * width, width // 2, kernel_size=3, padding=1, padding_mode="circular"),
        )
        self.decoder = nn.Sequential(
            nn.ConvTranspose1d(width // 2, 2 * width, kernel_size=4, stride=2, padding=1, bias=False),
            nn.BatchNorm1d(2 * width),
            nn.ELU(),
            nn.ConvTranspose1d(2 * width, width, kernel_size=4, stride=2, padding=1),
            nn.ELU(),
            nn.Conv1d(width, channels, kernel_size=1),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))


class Autoencoder3d(nn.Module):
    def __init__(self, channels: int = 1, width: int = 16) -> None:
        super().__init__()
        self.enc1 = self._block(nn.Conv3d(channels, width, 3, padding=1, bias=False), width)
        self.enc2 = self._block(nn.Conv3d(width, 2 * width, 3, stride=2, padding=1, bias=False), 2 * width)
        self.enc3 = self._block(nn.Conv3d(2 * width, 4 * width, 3, stride=(1, 2, 2), padding=1, bias=False), 4 * width)
        up2 = nn.ConvTranspose3d(4 * width, 2 * width, (1, 2, 2), stride=(1, 2, 2), bias=False)
        up1 = nn.ConvTranspose3d(2 * width, width, 3, stride=2, padding=1, output_padding=1, bias=False)
        self.dec2 = self._block(up2, 2 * width)
        self.dec1 = self._block(up1, width)
        self.out = nn.Conv3d(width, channels, 1)

    @staticmethod
    def _block(conv: nn.Module, width: int) -> nn.Sequential:
        return nn.Sequential(conv, nn.InstanceNorm3d(width, affine=True), nn.LeakyReLU(0.1, inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enc3(self.enc2(self.enc1(x)))
        return torch.sigmoid(self.out(self.dec1(self.dec2(x))))


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    example: Callable[[], tuple[Tensor, ...]]


def ready(model: nn.Module) -> nn.Module:
    # Fresh normalisations are all ones and zeros, under which a slice taken from the wrong place goes unseen.
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
        if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.1)
        if isinstance(module, ConvNeXtBlock):
            nn.init.uniform_(module.gamma, 0.2, 0.6)
    return model.double()


def case(build: Callable[[], nn.Module], example: Callable[[], tuple[Tensor, ...]]) -> Case:
    return Case(lambda: ready(build()), example)


def floats(*shape: int) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (torch.randn(*shape, dtype=torch.float64),)


def ids(vocab: int, *shape: int, count: int = 1) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: tuple(torch.randint(vocab, shape) for _ in range(count))


gpt_config = partial(GPTConfig, vocab=61, context=24, layers=12, heads=6, kv_heads=3, dim=24, init_std=0.15)
short_gpt = partial(gpt_config, layers=3)
narrow = partial(ResNet, classes=10, base=8)
# At 64x64 a network that divides by 32 ends on 2x2: batch statistics over fewer than 32 values are badly conditioned,
# and in three steps the rounding of one device alone would grow beyond what is compared.
small, medium = floats(4, 3, 32, 32), floats(8, 3, 64, 64)

ZOO: dict[str, Case] = {
    "vgg16": case(partial(VGG16, 10, width=8, hidden=96, pool=2, dropout=0.0), small),
    "vgg16_bn": case(partial(VGG16, 10, width=8, hidden=96, pool=7, batch_norm=True, dropout=0.0), small),
    "resnet18": case(partial(narrow, BasicBlock, (2, 2, 2, 2)), medium),
    "resnet50": case(partial(narrow, Bottleneck, (3, 4, 6, 3)), medium),
    "resnext50": case(partial(narrow, Bottleneck, (3, 4, 6, 3), groups=8, group_width=2), medium),
    "resnet18_gn": case(partial(narrow, BasicBlock, (2, 2, 2, 2), base=16, norm=partial(nn.GroupNorm, 4)), small),
    "se_resnet34": case(partial(narrow, BasicBlock, (3, 4, 6, 3), reduction=2), medium),
    "densenet121": case(partial(DenseNet, 10, growth=4, first=8), medium),
    "densenet_short": case(partial(DenseNet, 10, growth=4, first=8, blocks=(2, 3, 2, 2)), medium),
    "mobilenet_v2": case(partial(MobileNetV2, 10, width_mult=0.25, round_to=2, last=64, dropout=0.0), medium),
    "shufflenet_v2": case(partial(ShuffleNetV2, 10, widths=(8, 16, 32, 64, 96)), medium),
    "googlenet": case(partial(GoogLeNet, 10, divide=8, dropout=0.0), medium),
    "wide_conv": case(partial(WideConvNet, 10, widths=(90, 112, 128)), floats(4, 3, 16, 16)),
    "convmixer": case(partial(conv_mixer, 24, depth=8), floats(4, 3, 16, 16)),
    "convnext_small": case(partial(ConvNeXt, base=6, classes=10), small),
    "unet": case(partial(UNet, 2, base=6), floats(2, 3, 32, 32)),
    "unet_bilinear": case(partial(UNet, 2, base=6, upsample="bilinear"), floats(2, 3, 32, 32)),
    "unet_nearest": case(partial(UNet, 2, base=6, upsample="nearest"), floats(2, 3, 32, 32)),
    "vit_small_module": case(partial(ViT, ModuleAttentionBlock, image=32, patch=8, dim=24, depth=4, classes=10), small),
    "vit_small_fused": case(partial(ViT, FusedAttentionBlock, image=32, patch=8, dim=24, classes=10), small),
    "mlp_mixer": case(
        partial(MLPMixer, image=32, patch=8, dim=40, token_hidden=24, channel_hidden=160, classes=10), small
    ),
    "gpt2": case(lambda: GPT(short_gpt()), ids(61, 2, 20)),
    "gpt2_loss": case(lambda: GPT(gpt_config()), ids(61, 2, 20, count=2)),
    "gpt2_separate_tied": case(lambda: GPT(short_gpt(fused=False, tied=True)), ids(61, 2, 20)),
    "nanogpt": case(lambda: NanoGPT(short_gpt(tied=True, bias=False)), ids(61, 2, 20, count=2)),
    "lstm": case(partial(LSTMClassifier, vocab=50, embed=12, hidden=20, classes=3), ids(50, 4, 12)),
    "gru": case(partial(GRUClassifier, vocab=50, embed=12, hidden=20, classes=3), ids(50, 4, 12)),
    "super_resolution": case(partial(SuperResolution, channels=12, blocks=6), floats(2, 3, 8, 8)),
    "autoencoder1d": case(partial(Autoencoder1d, channels=2, width=12), floats(4, 2, 32)),
    "autoencoder3d": case(partial(Autoencoder3d, channels=1, width=6), floats(2, 1, 8, 8, 8)),
}
