"""Convolution, pooling, resampling and the norms of images."""

from typing import Any

import torch
import torch.nn.functional as F
from assertions import dequantized
from op_cases import BILINEAR, LINEAR, case, each
from torch import Tensor

# --- convolution -----------------------------------------------------------------------------

OUTSIDE = (1, 0, 1, 1), (0, 1, 1, 1)

case("conv1d", F.conv1d, [((2, 3, 9), (4, 3, 3)), ((4, 64, 256), (32, 64, 5))], *BILINEAR)
case(
    "conv2d",
    lambda x, w: F.conv2d(x, w, padding=1),
    [((2, 3, 6, 5), (4, 3, 3, 3)), ((1, 1, 1, 1), (1, 1, 3, 3)), ((2, 32, 16, 16), (64, 32, 3, 3))],
    *BILINEAR,
)
case(
    "conv2d_bias",
    lambda x, w, b: F.conv2d(x, w, b, stride=2, padding=1),
    [((2, 3, 6, 5), (4, 3, 3, 3), (4,)), ((4, 16, 16, 16), (32, 16, 3, 3), (32,))],
    (1, 0, 1, 1),
    (0, 1, 1, 1),
)
case(
    "conv2d_patches",
    lambda x, w: F.conv2d(x, w, stride=4),
    [((2, 3, 8, 8), (4, 3, 4, 4)), ((2, 3, 64, 64), (32, 3, 4, 4))],
    *BILINEAR,
)
case(
    "conv2d_pointwise_strided",
    lambda x, w: F.conv2d(x, w, stride=2),
    [((2, 3, 6, 6), (4, 3, 1, 1)), ((2, 64, 16, 16), (128, 64, 1, 1))],
    *BILINEAR,
)
case(
    "conv2d_depthwise_dilated",
    lambda x, w: F.conv2d(x, w, padding="same", dilation=2, groups=x.shape[1]),
    [((2, 4, 6, 6), (4, 1, 3, 3)), ((2, 32, 16, 16), (32, 1, 3, 3))],
    *BILINEAR,
)
case(
    "conv3d",
    lambda x, w: F.conv3d(x, w, padding=1),
    [((1, 2, 4, 4, 4), (3, 2, 3, 3, 3)), ((2, 16, 4, 8, 8), (16, 16, 3, 3, 3))],
    *BILINEAR,
)
case(
    "conv_transpose1d",
    lambda x, w: F.conv_transpose1d(x, w, stride=2, padding=1, output_padding=1),
    [((2, 3, 6), (3, 4, 3)), ((4, 64, 64), (64, 32, 3))],
    *BILINEAR,
)
case(
    "conv_transpose2d",
    lambda x, w: F.conv_transpose2d(x, w, stride=2),
    [((2, 4, 4, 4), (4, 3, 2, 2)), ((2, 64, 8, 8), (64, 32, 2, 2))],
    *BILINEAR,
)
case(
    "conv_transpose2d_sparse",
    lambda x, w, b: F.conv_transpose2d(x, w, b, stride=3, groups=2),
    [((2, 4, 4, 4), (4, 3, 2, 2), (6,)), ((2, 32, 8, 8), (32, 16, 2, 2), (32,))],
    (1, 0, 1, 1),
    (0, 1, 1, 1),
)
case("conv_transpose3d", F.conv_transpose3d, [((1, 2, 3, 3, 3), (2, 3, 2, 2, 2))], *BILINEAR)
case(
    "conv_tbc",
    lambda x, w, b: torch.conv_tbc(x, w, b, 1),
    [((5, 2, 3), (3, 3, 4), (4,)), ((64, 4, 32), (3, 32, 32), (32,))],
    (1, 0, 1, 1),
    (0, 1, 1, 1),
)

# --- pooling ---------------------------------------------------------------------------------

LINES = each((2, 3, 8), (4, 16, 256))
IMAGES = each((2, 3, 8, 8), (4, 16, 32, 32))
VOLUMES = each((1, 2, 6, 6, 6), (2, 8, 8, 8, 8))
SMALL = {"samples": 256}

case("max_pool1d", lambda x: F.max_pool1d(x, 2), LINES, LINEAR)
case("max_pool2d", lambda x: F.max_pool2d(x, 2), IMAGES, LINEAR)
case("max_pool2d_overlapping", lambda x: F.max_pool2d(x, 3, 2, 1), IMAGES, LINEAR)
case("max_pool2d_of_relu", lambda x: F.max_pool2d(x.relu(), 3, 2, 1), IMAGES, LINEAR)
case("max_pool3d", lambda x: F.max_pool3d(x, 2), VOLUMES, LINEAR)
case("max_pool2d_large", lambda x: F.max_pool2d(x, 8), IMAGES, LINEAR, **SMALL)
case("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 4), LINES, LINEAR)
case("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 3), IMAGES, LINEAR)
case("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 2), VOLUMES, LINEAR)


def fractional_max_pool(x: Tensor) -> Tensor:
    samples = torch.full((x.shape[0], x.shape[1], 2), 0.3, dtype=x.dtype)
    return F.fractional_max_pool2d(x, 2, output_ratio=(0.6, 0.6), _random_samples=samples)


def unpooled(x: Tensor) -> Tensor:
    places = (torch.arange(x.shape[-1] * x.shape[-2]) * 4).view(x.shape[-2:]).expand(x.shape)
    return F.max_unpool2d(x, places, 2)


case("fractional_max_pool2d", fractional_max_pool, IMAGES, LINEAR)
case("max_unpool2d", unpooled, IMAGES, LINEAR)
case("avg_pool1d", lambda x: F.avg_pool1d(x, 3, 2, 1), LINES, LINEAR)
case("avg_pool2d", lambda x: F.avg_pool2d(x, 2), IMAGES, LINEAR)
case("avg_pool2d_padded", lambda x: F.avg_pool2d(x, 5, 1, 2), IMAGES, LINEAR)
case(
    "avg_pool2d_of_inside",
    lambda x: F.avg_pool2d(x, 5, 3, 2, count_include_pad=False),
    IMAGES,
    LINEAR,
)
case("avg_pool2d_of_relu", lambda x: F.avg_pool2d(x.relu(), 4), IMAGES, LINEAR)
case("avg_pool3d", lambda x: F.avg_pool3d(x, 2), VOLUMES, LINEAR)
case("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), LINES, LINEAR)
case("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 4), IMAGES, LINEAR)
case("adaptive_avg_pool2d_to_1", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGES, LINEAR)
case("adaptive_avg_pool2d_larger", lambda x: F.adaptive_avg_pool2d(x, 40), IMAGES, LINEAR)
case("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (2, 3, 4)), VOLUMES, LINEAR)
case("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), IMAGES, LINEAR, tolerance=4)

# --- norms -----------------------------------------------------------------------------------

CHANNELS = [((4, 3, 4, 4), (3,), (3,)), ((8, 16, 16, 16), (16,), (16,))]
WEIGHTED = (0, 1, 1, 1)
NORMED: dict[str, Any] = {"tolerance": 2}


def statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics of the data, as after a training."""
    v = dequantized(x).transpose(0, 1).flatten(1)
    return v.mean(1).to(x.dtype), v.var(1).to(x.dtype)


def fresh(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the statistics that a module starts with."""
    start = torch.zeros(x.shape[1], dtype=x.dtype)
    return start, start + 1


case(
    "batch_norm",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    CHANNELS,
    WEIGHTED,
    **NORMED,
)
case("batch_norm_bare", lambda x: F.batch_norm(x, None, None, training=True), IMAGES, **NORMED)
case(
    "batch_norm_1d",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    [((8, 3), (3,), (3,)), ((1024, 16), (16,), (16,))],
    WEIGHTED,
    tolerance=4,
)
case(
    "batch_norm_running",
    lambda x, w, b: F.batch_norm(x, *fresh(x), w, b, training=True),
    CHANNELS,
    WEIGHTED,
    **NORMED,
)
case(
    "batch_norm_evaluated",
    lambda x, w, b: F.batch_norm(x, *statistics(x), w, b),
    CHANNELS,
    WEIGHTED,
    tolerance=2,
)
case(
    "batch_norm_evaluated_fresh",
    lambda x, w, b: F.batch_norm(x, *fresh(x), w, b),
    CHANNELS,
    WEIGHTED,
    tolerance=2,
)
case(
    "instance_norm",
    lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
    CHANNELS,
    WEIGHTED,
    tolerance=4,
)
case(
    "group_norm",
    lambda x, w, b: F.group_norm(x, 2, w, b),
    [((4, 4, 4, 4), (4,), (4,)), ((4, 32, 16, 16), (32,), (32,))],
    WEIGHTED,
    **NORMED,
)
case("group_norm_bare", lambda x: F.group_norm(x, 1), IMAGES, **NORMED)
case("local_response_norm", lambda x: F.local_response_norm(x, 3), IMAGES, scales=0, **NORMED)

# --- resampling ------------------------------------------------------------------------------

MODES: dict[str, Any] = {
    "nearest": {},
    "nearest-exact": {},
    "bilinear": {"align_corners": False},
    "bicubic": {"align_corners": True},
    "area": {},
}
for mode, options in MODES.items():
    for factor in (2, 0.5):
        case(
            f"interpolate_{mode}_{factor}",
            lambda x, mode=mode, factor=factor, options=options: F.interpolate(
                x, scale_factor=factor, mode=mode, **options
            ),
            IMAGES,
            LINEAR,
        )
case(
    "interpolate_linear",
    lambda x: F.interpolate(x, size=13, mode="linear", align_corners=True),
    LINES,
    LINEAR,
)
case("interpolate_trilinear", lambda x: F.interpolate(x, size=5, mode="trilinear"), VOLUMES, LINEAR)
for mode in ("bilinear", "bicubic"):
    case(
        f"interpolate_{mode}_antialias",
        lambda x, mode=mode: F.interpolate(x, size=(5, 11), mode=mode, antialias=True),
        IMAGES,
        LINEAR,
    )
case("interpolate_of_relu", lambda x: F.interpolate(x.relu(), size=5, mode="bilinear"), IMAGES)


def sampled(x: Tensor, mode: str, **options: Any) -> Tensor:
    rng = torch.Generator().manual_seed(7)
    grid = torch.rand(x.shape[0], 6, 7, 2, generator=rng) * 2 - 1
    return F.grid_sample(x, grid.bfloat16().to(x.dtype), mode=mode, align_corners=False, **options)


for mode in ("bilinear", "nearest", "bicubic"):
    case(
        f"grid_sample_{mode}",
        lambda x, mode=mode: sampled(x, mode, padding_mode="border"),
        each((2, 3, 8, 8), (4, 16, 8, 8)),
        LINEAR,
    )
case(
    "grid_sample_at",
    lambda x, grid: F.grid_sample(x, grid.tanh(), align_corners=True, padding_mode="border"),
    [((2, 3, 8, 8), (2, 4, 4, 2)), ((2, 16, 16, 16), (2, 16, 16, 2))],
    (1, 0, 1),
    scales=0,
    tolerance=8,
)
case(
    "affine_grid",
    lambda theta: F.affine_grid(theta, (theta.shape[0], 1, 5, 6), align_corners=False),
    each((2, 2, 3), (64, 2, 3)),
    LINEAR,
    tolerance=2,
)
for mode in ("reflect", "replicate", "circular"):
    case(f"pad_{mode}", lambda x, mode=mode: F.pad(x, (2, 1, 1, 2), mode), IMAGES, LINEAR)
case("pad_reflect_1d", lambda x: F.pad(x, (3, 3), "reflect"), LINES, LINEAR)
case("pad_replicate_3d", lambda x: F.pad(x, (1, 1, 2, 0, 0, 3), "replicate"), VOLUMES, LINEAR)
case("unfold_patches", lambda x: F.unfold(x, 3, padding=1), IMAGES, LINEAR)
case(
    "fold_patches",
    lambda x: F.fold(x, 8, 3, padding=1, stride=2),
    each((2, 2 * 9, 16), (4, 16 * 9, 16)),
    LINEAR,
)
case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), each((2, 4, 3, 3), (2, 16, 8, 8)), LINEAR)
case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), IMAGES, LINEAR)
case("channel_shuffle", lambda x: F.channel_shuffle(x, 2), each((2, 4, 3, 3)), LINEAR)
