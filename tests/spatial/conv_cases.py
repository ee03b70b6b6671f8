"""Random convolutions, and the same one on one device: the oracle of the ring convolution's tests."""

from __future__ import annotations

import dataclasses
import math
import random

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.spatial.convolution.method import Regime, choose_form
from shardkit.spatial.convolution.spec import LocalConv
from shardkit.spatial.windows import Window, extended_index, shard_window


@dataclasses.dataclass(frozen=True)
class Case:
    """Everything that defines one sharded convolution."""

    mesh: tuple[tuple[str, int], ...]
    axes: tuple[tuple[str, str], ...]  # mesh axis -> letter
    lhs: str  # dims order, e.g. "NHWC"
    rhs: str
    sizes: tuple[int, ...]  # spatial, in the order of ``letters``
    kernels: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] | str = "SAME"
    lhs_dilation: tuple[int, ...] = ()
    rhs_dilation: tuple[int, ...] = ()
    modes: tuple[str, ...] = ()
    feature_groups: int = 1
    batch_groups: int = 1
    batch: int = 2
    features: tuple[int, int] = (4, 4)
    batch_axis: str | None = None

    @property
    def letters(self) -> str:
        """Spatial letters in the kernel's order, which is what lax reads strides by."""
        return "".join(c for c in self.rhs if c not in "IO")

    def per_dim(self, values, default):
        return tuple(values) or (default,) * len(self.letters)

    @property
    def keywords(self) -> dict:
        return {
            "window_strides": self.per_dim(self.strides, 1),
            "padding": self.padding,
            "lhs_dilation": self.per_dim(self.lhs_dilation, 1),
            "rhs_dilation": self.per_dim(self.rhs_dilation, 1),
            "dimension_numbers": (self.lhs, self.rhs, self.lhs),
            "feature_group_count": self.feature_groups,
            "batch_group_count": self.batch_groups,
        }

    def shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = dict(zip(self.letters, self.sizes, strict=True)) | {"N": self.batch, "C": self.features[0]}
        kernels = dict(zip(self.letters, self.kernels, strict=True))
        kernels |= {"I": self.features[0] // self.feature_groups, "O": self.features[1]}
        return tuple(sizes[c] for c in self.lhs), tuple(kernels[c] for c in self.rhs)

    def operands(self, seed: int = 0, dtype=np.float64):
        rng = np.random.default_rng(seed)
        return tuple(rng.normal(size=shape).astype(dtype) for shape in self.shapes())

    def placements(self) -> dict:
        placed = {}
        for axis, letter in self.axes:
            for name in (axis,) if isinstance(axis, str) else axis:
                placed[name] = sk.Shard(self.lhs.index(letter))
        if self.batch_axis:
            placed[self.batch_axis] = sk.Shard(self.lhs.index("N"))
        return placed

    def make_mesh(self, axis_types="auto"):
        return sk.make_mesh(dict(self.mesh), axis_types=axis_types)

    def windows(self) -> list[Window]:
        pads = self.padding
        strides, rd = self.per_dim(self.strides, 1), self.per_dim(self.rhs_dilation, 1)
        if isinstance(pads, str):
            reach = [(k - 1) * d + 1 for k, d in zip(self.kernels, rd, strict=True)]
            pads = lax.padtype_to_pads(self.sizes, reach, strides, pads)
        ld = self.per_dim(self.lhs_dilation, 1)
        return [
            Window(n, k, s, lo, hi, a, b)
            for n, k, s, (lo, hi), a, b in zip(self.sizes, self.kernels, strides, pads, ld, rd, strict=True)
        ]

    def shards(self, letter: str) -> int:
        """Blocks that a dim is cut into."""
        sizes = dict(self.mesh)
        cuts = [(a,) if isinstance(a, str) else a for a, where in self.axes if where == letter]
        return math.prod(sizes[name] for names in cuts for name in names)

    def local_conv(self) -> LocalConv:
        """What each device would be told to do, without a mesh or an array: the form "concat"."""
        numbers = lax.conv_dimension_numbers(*self.shapes(), (self.lhs, self.rhs, self.lhs))
        named = {letter: axis for axis, letter in self.axes}
        modes = self.per_dim(self.modes, "zeros")
        return LocalConv(
            *(tuple(spec) for spec in (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)),
            windows=tuple(
                shard_window(w, self.shards(letter), m)
                for w, letter, m in zip(self.windows(), self.letters, modes, strict=True)
            ),
            axes=tuple(named.get(letter) for letter in self.letters),
            modes=modes,
            feature_groups=self.feature_groups,
            batch_groups=self.batch_groups,
            precision=None,
            preferred_element_type=None,
        )

    def in_form(self, method: str, images_known: bool = True) -> LocalConv:
        """The same in the form asked for; ValueError where it can't run."""
        images = self.batch // self.shards("N") if images_known else self.batch
        regime = Regime("cpu", images, images_known, 1, 1)
        return choose_form(self.local_conv(), method, regime, "ring_conv")

    def reference(self, x, kernel):
        """lax on one device; edges that aren't zeros are laid out element by element first."""
        modes = self.per_dim(self.modes, "zeros")
        keywords = dict(self.keywords)
        if any(m != "zeros" for m in modes):
            padding, dilation = list(self.padding), list(keywords["lhs_dilation"])
            for i, (letter, mode) in enumerate(zip(self.letters, modes, strict=True)):
                if mode != "zeros":
                    x = lay_out(x, self.lhs.index(letter), *padding[i], mode, dilation[i])
                    padding[i], dilation[i] = (0, 0), 1
            keywords |= {"padding": padding, "lhs_dilation": dilation}
        return lax.conv_general_dilated(x, kernel, **keywords)

    def ring(self, mesh=None, **changes):
        """The function under test."""
        keywords = self.keywords | {"padding_mode": self.per_dim(self.modes, "zeros")} | changes
        return lambda x, kernel: sk.ring_conv(x, kernel, **keywords, spatial_axes=dict(self.axes), mesh=mesh)


def lay_out(x, dim: int, low: int, high: int, mode: str, dilation: int):
    """``x`` extended over both ends of ``dim`` in dilated positions, by definition (an index table)."""
    size = x.shape[dim]
    index = []
    for position in range(-low, (size - 1) * dilation + 1 + high):
        on_grid = position % dilation == 0
        element = extended_index(position // dilation, size, mode) if on_grid else None
        index.append(-1 if element is None else element)
    index = np.asarray(index)
    taken = jnp.take(x, np.maximum(index, 0), axis=dim)
    real = (index >= 0).reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    return jnp.where(real, taken, 0)


MESHES = (
    (("sp", 1),),
    (("sp", 2),),
    (("sp", 4),),
    (("sp", 8),),
    (("dp", 2), ("sp", 4)),
    (("sq", 2), ("sp", 4)),
    (("dp", 2), ("sp", 2), ("sq", 2)),
)


def draw(rng: random.Random) -> Case:
    """One random configuration that has an output."""
    while True:
        count = rng.choice((1, 2, 2, 2, 3))
        mesh = rng.choice(MESHES)
        letters = "DHW"[-count:]
        space = [a for a, _ in mesh if a != "dp"]
        cut = rng.sample(letters, min(len(space), count))
        modes = tuple(rng.choice(("zeros", "zeros", "zeros", "circular", "reflect", "replicate")) for _ in letters)
        lowest = 0 if any(m != "zeros" for m in modes) else -1
        largest = 14 if count > 1 else 30
        case = Case(
            mesh=mesh,
            axes=tuple(zip(space, cut, strict=False)),
            lhs=rng.choice((f"N{letters}C", f"NC{letters}")),
            rhs=rng.choice((f"{letters}IO", f"OI{letters}")),
            sizes=tuple(rng.randint(1, largest) for _ in letters),
            kernels=tuple(rng.randint(1, 4) for _ in letters),
            strides=tuple(rng.randint(1, 3) for _ in letters),
            padding=tuple((rng.randint(lowest, 4), rng.randint(lowest, 4)) for _ in letters),
            lhs_dilation=tuple(rng.choice((1, 1, 1, 2, 3)) for _ in letters),
            rhs_dilation=tuple(rng.choice((1, 1, 2, 3)) for _ in letters),
            modes=modes,
            feature_groups=rng.choice((1, 1, 1, 2, 4)),
            batch_axis="dp" if mesh[0][0] == "dp" and rng.random() < 0.7 else None,
        )
        if case.feature_groups == 1 and case.batch_axis is None and rng.random() < 0.1:
            case = dataclasses.replace(case, batch_groups=2)
        if any(w.output_size < 1 for w in case.windows()):
            continue
        if any(m == "reflect" and max(p) >= s for m, p, s in zip(modes, case.padding, case.sizes, strict=True)):
            continue
        return case


def _aligned(rng: random.Random, shards: int, chunks: int, mode: str) -> dict:
    """One dim whose blocks all see the same windows: what "overlap" and "blocks" ask for.

    Blocks of ``q * stride`` inputs and ``q * lhs_dilation`` outputs, the last ones short or empty now and then;
    padding makes up the difference.
    """
    q = chunks * rng.randint(1, max(1, 5 // chunks))
    stride, taps, spread = rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 3, 3, 4, 5)), rng.choice((1, 1, 1, 2))
    dilation = rng.choice((1, 1, 1, 1, 2)) if stride < 3 else 1
    block, out_block = q * stride, q * dilation
    missing, short = (0, 0) if mode == "circular" or rng.random() < 0.4 else (rng.randint(0, 3), rng.randint(0, 3))
    size, out = block * shards - min(missing, block - 1), out_block * shards - min(short, out_block - 1)
    reach = (taps - 1) * spread + 1
    total = (out - 1) * stride + reach - ((size - 1) * dilation + 1) + rng.randint(0, stride - 1)
    low = rng.randint(-1, max(0, min(total, reach)) + 1) if mode == "zeros" else rng.randint(0, max(0, total))
    return {
        "sizes": size,
        "kernels": taps,
        "strides": stride,
        "padding": (low, total - low),
        "lhs_dilation": dilation,
        "rhs_dilation": spread,
        "modes": mode,
    }


def _anyhow(rng: random.Random, mode: str) -> dict:
    """One dim of a device's own, for which there is nothing to align."""
    lowest = 0 if mode != "zeros" else -1
    return {
        "sizes": rng.randint(4, 9),
        "kernels": rng.randint(1, 4),
        "strides": rng.randint(1, 3),
        "padding": (rng.randint(lowest, 3), rng.randint(lowest, 3)),
        "lhs_dilation": rng.choice((1, 1, 1, 2)),
        "rhs_dilation": rng.choice((1, 1, 2)),
        "modes": mode,
    }


def draw_for(rng: random.Random, method: str) -> Case:
    """One random configuration that really runs in the form ``method``, drawn again where it can't."""
    while True:
        count = rng.choice((1, 2, 2, 2, 3))
        mesh = rng.choice(MESHES)
        letters = "DHW"[-count:]
        space = [a for a, _ in mesh if a != "dp"]
        cut = dict(zip(space, rng.sample(letters, min(len(space), count)), strict=False))
        cut_into = {letter: dict(mesh)[axis] for axis, letter in cut.items()}
        chunks = rng.choice((2, 2, 4, 8)) if method == "blocks" else 1
        others = (*["zeros"] * 6, "circular", *(["reflect", "replicate"] if method == "blocks" else []))
        dims = []
        for letter in letters:
            if letter in cut_into or rng.random() < 0.3:
                mode = rng.choice((*["zeros"] * 6, "circular"))
                dims.append(_aligned(rng, cut_into.get(letter, 1), chunks, mode))
            else:
                dims.append(_anyhow(rng, rng.choice(others)))
        dp = mesh[0][0] == "dp"
        named = dp and rng.random() < 0.4  # the batch axis in spatial_axes too
        groups = rng.choice((1, 1, 1, 2, 4))
        case = Case(
            mesh=mesh,
            axes=(*cut.items(), *([("dp", "N")] if named else [])),
            lhs=rng.choice((f"N{letters}C", f"NC{letters}")),
            rhs=rng.choice((f"{letters}IO", f"OI{letters}")),
            **{key: tuple(d[key] for d in dims) for key in dims[0]},
            feature_groups=groups,
            batch=rng.choice((2, 2, 4, 16)) if method == "blocks" else 2,
            batch_axis="dp" if dp and not named and rng.random() < 0.7 else None,
        )
        if method == "overlap" and groups == 1 and not dp and rng.random() < 0.15:
            case = dataclasses.replace(case, batch_groups=2)
        if any(w.output_size < 1 for w in case.windows()) or math.prod(case.sizes) * case.batch > 6000:
            continue
        if any(m != "zeros" and min(p) < 0 for m, p in zip(case.modes, case.padding, strict=True)):
            continue
        if any(m == "reflect" and max(p) >= s for m, p, s in zip(case.modes, case.padding, case.sizes, strict=True)):
            continue
        try:
            case.in_form(method)
        except ValueError:
            continue
        if method == "overlap" and not any(w.exchange.messages for w in case.local_conv().windows):
            continue  # no edge to put right
        return case


# Where XLA's own partitioner gathers the activation (openxla/xla#47945 and kin), and other named corners.
SP8, SP4, DPSP = (("sp", 8),), (("sp", 4),), (("dp", 2), ("sp", 4))
W = (("sp", "W"),)
NAMED = {
    "grouped, sharded in W": Case(SP4, W, "NHWC", "HWIO", (6, 16), (3, 3), feature_groups=2),
    "grouped, batch sharded too": Case(
        DPSP, W, "NHWC", "HWIO", (6, 16), (3, 3), feature_groups=2, batch=4, batch_axis="dp"
    ),
    "depthwise, batch sharded too": Case(
        DPSP, W, "NHWC", "HWIO", (6, 16), (3, 3), feature_groups=4, batch=4, features=(4, 8), batch_axis="dp"
    ),
    "transposed, lhs dilation 2": Case(
        SP8, W, "NHWC", "HWIO", (6, 16), (4, 4), padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)
    ),
    "VALID, output not divisible": Case(SP4, W, "NHWC", "HWIO", (6, 16), (3, 3), padding="VALID"),
    "kernel is stride, nothing to send": Case(SP4, W, "NHWC", "HWIO", (6, 16), (2, 2), strides=(2, 2), padding="VALID"),
    "k=3 s=2 on two shards of 4": Case((("sp", 2),), W, "NWC", "WIO", (8,), (3,), strides=(2,)),
    "k=s=2 on shards of 5": Case((("sp", 2),), W, "NWC", "WIO", (10,), (2,), strides=(2,), padding="VALID"),
    "halo wider than a block": Case(SP8, W, "NWC", "WIO", (16,), (9,), rhs_dilation=(1,)),
    "5 over 4: a short and an empty shard": Case(SP4, W, "NWC", "WIO", (5,), (3,)),
    "even kernel": Case(SP4, W, "NWC", "WIO", (16,), (4,)),
    "stride beyond the kernel": Case(SP4, W, "NWC", "WIO", (17,), (1,), strides=(3,), padding="VALID"),
    "cropping padding": Case(SP4, W, "NWC", "WIO", (17,), (3,), padding=((-2, -1),)),
    "globe: circular W, replicated H": Case(
        (("sq", 2), ("sp", 4)),
        (("sq", "H"), ("sp", "W")),
        "NHWC",
        "HWIO",
        (9, 18),
        (3, 5),
        padding=((1, 1), (2, 2)),
        modes=("replicate", "circular"),
    ),
    "two axes on one dim": Case((("sq", 2), ("sp", 4)), ((("sq", "sp"), "W"),), "NCW", "OIW", (19,), (3,)),  # type: ignore[arg-type]
    "volume sharded in D and W": Case(
        (("sq", 2), ("sp", 4)), (("sq", "D"), ("sp", "W")), "NCDHW", "OIDHW", (6, 3, 12), (3, 3, 3)
    ),
}


def derivatives(function):
    """Output, input and kernel gradients, and a tangent, of a convolution: everything one sweep looks at."""

    def run(x, kernel, cotangent, dx, dkernel):
        out, pull = jax.vjp(function, x, kernel)
        _, tangent = jax.jvp(function, (x, kernel), (dx, dkernel))
        return out, pull(cotangent), tangent

    return run
