"""ring_conv_transpose against lax.conv_transpose on one device: values, gradients, shardings and collectives."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax import numpy as jnp

import shardkit as sk
from shardkit.inspect.collectives import read_collectives
from shardkit.spatial.convolution.transpose import transpose_padding


@dataclasses.dataclass(frozen=True)
class Case:
    """One transposed convolution, sharded in space."""

    sizes: tuple[int, ...]
    kernels: tuple[int, ...]
    strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...] = "SAME"
    rhs_dilation: tuple[int, ...] | None = None
    transpose_kernel: bool = False
    mesh: tuple[tuple[str, int], ...] = (("sp", 4),)
    axes: tuple[tuple[str, str], ...] = (("sp", "W"),)
    channels_first: bool = False
    batch_axis: str | None = None

    @property
    def letters(self) -> str:
        return "DHW"[-len(self.sizes) :]

    @property
    def lhs(self) -> str:
        return f"NC{self.letters}" if self.channels_first else f"N{self.letters}C"

    @property
    def rhs(self) -> str:
        return f"OI{self.letters}" if self.channels_first else f"{self.letters}IO"

    @property
    def arguments(self) -> tuple:
        numbers = (self.lhs, self.rhs, self.lhs) if self.channels_first else None  # None: channels last
        return self.strides, self.padding, self.rhs_dilation, numbers, self.transpose_kernel

    def reference(self, x, kernel):
        return lax.conv_transpose(x, kernel, *self.arguments)

    def ring(self, mesh=None):
        return lambda x, kernel: sk.ring_conv_transpose(
            x, kernel, *self.arguments, spatial_axes=dict(self.axes), mesh=mesh
        )

    def operands(self):
        """Batch 2, 3 features in and 4 out, whichever way round the kernel is given."""
        inside, outside = (4, 3) if self.transpose_kernel else (3, 4)
        sizes = dict(zip(self.letters, self.sizes, strict=True)) | {"N": 2, "C": 3}
        kernels = dict(zip(self.letters, self.kernels, strict=True)) | {"I": inside, "O": outside}
        rng = np.random.default_rng(3)
        return rng.normal(size=[sizes[c] for c in self.lhs]), rng.normal(size=[kernels[c] for c in self.rhs])

    def placements(self) -> dict:
        placed = {axis: sk.Shard(self.lhs.index(letter)) for axis, letter in self.axes}
        return placed | ({self.batch_axis: sk.Shard(0)} if self.batch_axis else {})


def value_and_pullback(function):
    def run(x, kernel, cotangent):
        out, pull = jax.vjp(function, x, kernel)
        return out, *pull(cotangent)

    return run


def check(case: Case, axis_types: str = "auto"):
    """Output and both gradients, where they are, and what travelled."""
    mesh = sk.make_mesh(dict(case.mesh), axis_types=axis_types)
    x, kernel = case.operands()
    shape = jax.eval_shape(case.reference, x, kernel).shape
    cotangent = np.random.default_rng(4).normal(size=shape)
    want = jax.jit(value_and_pullback(case.reference))(x, kernel, cotangent)

    pad = lambda a: sk.shard_tensor(a, case.placements(), mesh, uneven="pad")  # noqa: E731
    args = (pad(x), kernel, pad(cotangent))
    with jax.set_mesh(mesh) if axis_types == "explicit" else contextlib.nullcontext():
        compiled = jax.jit(value_and_pullback(case.ring(mesh))).lower(*args).compile()
        out, grad_x, grad_kernel = compiled(*args)

    assert isinstance(out, sk.Padded) and out.shape == shape
    assert sk.placements(out) == sk.Layout(mesh, case.placements()).placements
    assert sk.placements(grad_x) == sk.placements(args[0])
    for got, expected in zip((out, grad_x, grad_kernel), want, strict=True):
        np.testing.assert_allclose(np.asarray(got), expected, rtol=0, atol=1e-10 * max(1, np.abs(expected).max()))

    report = read_collectives(compiled.as_text(), mesh)
    assert report.count("all_gather") == 0, str(report)
    assert report.count("all_to_all") == 0, str(report)
    assert all(e.result_bytes <= kernel.nbytes for e in report if e.kind == "all_reduce"), str(report)
    return report


CASES = {
    "SAME, 13 over 4": Case((13,), (3,), (2,)),
    "VALID, 13 over 4": Case((13,), (5,), (3,), "VALID"),
    "pairs, 5 over 4": Case((5,), (4,), (2,), ((1, 2),)),
    "cropping pairs": Case((13,), (3,), (1,), ((-1, 1),)),
    "one tap, gaps between outputs": Case((5,), (1,), (3,)),
    "stride beyond the kernel": Case((13,), (2,), (3,), "VALID"),
    "stride 1": Case((16,), (5,), (1,), "VALID", mesh=(("sp", 8),)),
    "dilated kernel": Case((13,), (3,), (2,), rhs_dilation=(2,)),
    "dilated kernel wider than a block": Case((5,), (5,), (2,), "VALID", rhs_dilation=(3,)),
    "transposed kernel, SAME": Case((6, 13), (3, 4), (1, 2), transpose_kernel=True),
    "transposed kernel, VALID": Case((5,), (5,), (3,), "VALID", transpose_kernel=True),
    "channels first": Case((4, 13), (3, 3), (2, 2), channels_first=True, transpose_kernel=True),
    "H and W": Case((5, 13), (3, 2), (2, 3), mesh=(("sq", 2), ("sp", 4)), axes=(("sq", "H"), ("sp", "W"))),
    "volume": Case((5, 2, 3), (3, 2, 1), (2, 1, 2), "VALID", mesh=(("sp", 2),), axes=(("sp", "D"),)),
    "batch sharded too": Case((4, 13), (4, 4), (2, 2), mesh=(("dp", 2), ("sp", 4)), batch_axis="dp"),
}
EXPLICIT = {"SAME, 13 over 4", "transposed kernel, VALID", "channels first", "H and W", "batch sharded too"}


# Each a word away from another that stays.
ALIKE = {"stride 1", "stride beyond the kernel", "dilated kernel", "transposed kernel, VALID", "volume"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in ALIKE else n for n in CASES])
def test_equals_lax(name):
    check(CASES[name], "explicit" if name in EXPLICIT else "auto")


def test_kernel_as_long_as_the_stride_needs_no_neighbour():
    report = check(Case((4, 16), (2, 2), (2, 2)))
    assert report.count("collective_permute") == 0, str(report)


def test_forward_moves_the_lower_bound():
    """3 taps, stride 2, SAME on aligned blocks: the last element of the left neighbour, nothing else."""
    case = Case((16,), (3,), (2,))
    mesh = sk.make_mesh({"sp": 4})
    x, kernel = case.operands()
    x = sk.shard_tensor(x, case.placements(), mesh)
    report = sk.collectives(case.ring(mesh), x, kernel, mesh=mesh)
    assert report.by_kind() == {"collective_permute": 1}
    assert report.bytes() == 2 * 1 * 3 * 8


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_plain_arrays_give_plain_arrays(wrap):
    case = CASES["VALID, 13 over 4"]
    x, kernel = case.operands()
    out = wrap(case.ring(sk.make_mesh({"sp": 4})))(x, kernel)
    assert isinstance(out, jax.Array)
    np.testing.assert_allclose(out, case.reference(x, kernel), atol=1e-10)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_is_the_transpose_of_the_strided_convolution(padding):
    """By definition: with its kernel transposed it is the input gradient of the convolution."""
    numbers, stride = ("NWC", "WIO", "NWC"), 2
    rng = np.random.default_rng(5)
    kernel, y = rng.normal(size=(4, 3, 2)), rng.normal(size=(2, 7, 2))
    size = 7 * stride if padding == "SAME" else 6 * stride + 4
    forward = lambda x: lax.conv_general_dilated(x, kernel, (stride,), padding, dimension_numbers=numbers)  # noqa: E731
    (want,) = jax.linear_transpose(forward, jnp.zeros((2, size, 3)))(jnp.asarray(y))
    got = sk.ring_conv_transpose(
        y, kernel, (stride,), padding, transpose_kernel=True, spatial_axes={"sp": "W"}, mesh=sk.make_mesh({"sp": 4})
    )
    np.testing.assert_allclose(got, want, atol=1e-10)


# --- the arithmetic, without arrays -------------------------------------------------------------------


@given(size=st.integers(1, 30), kernel=st.integers(1, 9), stride=st.integers(1, 5))
def test_valid_padding_keeps_every_tap(size, kernel, stride):
    """Element ``i`` reaches outputs ``i * stride + low - tap``: all of them exist, the first of them is output 0."""
    low, high = transpose_padding(kernel, stride, "VALID")
    outputs = (size - 1) * stride + 1 + low + high - kernel + 1
    reached = [i * stride + low - tap for i in range(size) for tap in range(kernel)]
    assert min(reached) == 0
    assert max(reached) < outputs
    assert outputs == size * stride + max(kernel - stride, 0)


@given(size=st.integers(1, 30), kernel=st.integers(1, 9), stride=st.integers(1, 5))
def test_same_padding_transposes_the_same_convolution(size, kernel, stride):
    """``size * stride`` outputs, and the edges cropped that the convolution the other way pads."""
    low, high = transpose_padding(kernel, stride, "SAME")
    assert (size - 1) * stride + 1 + low + high - kernel + 1 == size * stride
    ((before, _),) = lax.padtype_to_pads((size * stride,), (kernel,), (stride,), "SAME")
    assert low == kernel - 1 - before


def test_names_in_either_case_and_pairs_as_they_are():
    assert transpose_padding(3, 2, "same") == transpose_padding(3, 2, "SAME") == (2, 1)
    assert transpose_padding(5, 3, "valid") == transpose_padding(5, 3, "VALID") == (4, 4)
    assert transpose_padding(5, 3, (-1, 7)) == (-1, 7)


# --- bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"padding": "CAUSAL"}, "padding='CAUSAL' is unknown; use 'SAME', 'VALID' or"),
        ({"padding": [(1, 1)]}, "padding=.* has 1 entries for 2 spatial dims"),
        ({"padding": [(1, 1), 3]}, "one .low, high. pair a spatial dim"),
        ({"padding": 3}, "padding=3 .*use 'SAME', 'VALID' or"),
        ({"strides": (2,)}, r"strides=\(2,\) has 1 entries for 2 spatial dims"),
        ({"strides": (2, 0)}, "must be at least 1"),
        ({"rhs_dilation": (1, 1, 1)}, "rhs_dilation=.* has 3 entries for 2 spatial dims"),
        ({"spatial_axes": {"tp": "W"}}, "names mesh axis 'tp'"),
        ({"spatial_axes": {"sp": "D"}}, "names dim 'D'"),
        ({"lhs": np.ones((2, 8, 3))}, "equal rank of at least 3"),
        ({"lhs": np.ones((2, 3)), "rhs": np.ones((3, 3))}, "equal rank of at least 3"),
        ({"lhs": np.ones((2, 8, 8, 5))}, "lhs has 5 features, but the kernel"),
        ({"padding": [(-9, -9), (0, 0)]}, "no output in spatial dim 0"),
    ],
)
def test_bad_input_is_named(changes, message):
    good = {
        "lhs": np.ones((2, 8, 8, 3)),
        "rhs": np.ones((3, 3, 3, 4)),
        "strides": (2, 2),
        "padding": "SAME",
        "spatial_axes": {"sp": "W"},
    }
    with pytest.raises(ValueError, match=message):
        sk.ring_conv_transpose(**(good | changes), mesh=sk.make_mesh({"sp": 4}))


def test_four_spatial_dims_need_names():
    with pytest.raises(ValueError, match="give dimension_numbers for 4 spatial dims"):
        sk.ring_conv_transpose(
            np.ones((1, 2, 2, 2, 2, 1)),
            np.ones((1, 1, 1, 1, 1, 1)),
            (1,) * 4,
            "SAME",
            spatial_axes={"sp": 4},
            mesh=sk.make_mesh({"sp": 2}),
        )
