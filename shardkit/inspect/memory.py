"""`memory`: how much memory a compiled program takes on one device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import rich.table

from shardkit.inspect import compiling
from shardkit.inspect.tables import Table, format_bytes


@dataclasses.dataclass(frozen=True)
class MemoryReport:
    """Bytes on one device, as the compiler has allotted them. `print` it for a table.

    Attributes:
      arguments: the inputs.
      outputs: the results, with those that reuse an input's memory.
      temporaries: what lives only while the program runs.
      aliased: the part of `outputs` that reuses the memory of donated inputs.
      generated_code: the program itself, where it lives on the device (0 on CPU).
      peak: the most in use at any moment, or None if the backend does not say.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> report = sk.memory(jnp.cos, jnp.ones(256, "float32"))
      >>> report.arguments, report.outputs, report.total >= 2048
      (1024, 1024, True)
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    generated_code: int
    peak: int | None = None

    @property
    def total(self) -> int:
        """What must fit, in bytes: arguments + outputs + temporaries + generated_code - aliased."""
        return self.arguments + self.outputs + self.temporaries + self.generated_code - self.aliased

    def to_dict(self) -> dict[str, int | None]:
        """Name -> bytes, `total` included."""
        return {**dataclasses.asdict(self), "total": self.total}

    def _table(self) -> Table:
        parts = [
            ("arguments", self.arguments, "inputs"),
            ("outputs", self.outputs, "results"),
            ("temporaries", self.temporaries, "alive only while it runs"),
            ("generated code", self.generated_code, "the program itself"),
            ("aliased", -self.aliased, "outputs in the memory of donated inputs"),
            ("total", self.total, "sum of the above"),
        ]
        if self.peak is not None:
            parts.append(("peak", self.peak, "most in use at any moment"))
        rows = [(name, format_bytes(size), f"{size:,}", meaning) for name, size, meaning in parts]
        headers = ("part", "size", "bytes", "meaning")
        return Table("Memory on one device", headers, rows, frozenset({"size", "bytes"}))

    def __str__(self) -> str:
        return self._table().to_text()

    def _repr_html_(self) -> str:
        return self._table().to_html()

    def __rich__(self) -> rich.table.Table:
        return self._table().to_rich()


def memory(fun: Any, *args: Any, **kwargs: Any) -> MemoryReport:
    """The memory that `fun`, compiled for these arguments, takes on one device. Nothing is run.

    Args:
      fun: a function, a jitted function, or a `jax.stages` Traced, Lowered or Compiled (then without
        arguments). Donated arguments show as `aliased`.
      *args: arguments of `fun`: arrays, `jax.ShapeDtypeStruct`s with shardings, pytrees of these.
      **kwargs: keyword arguments of `fun`.

    Returns:
      The report, all figures in bytes for one device.

    Raises:
      TypeError: `fun` is not a function or program.
      RuntimeError: the backend has no memory analysis.

    Example:
      >>> import jax.numpy as jnp, shardkit as sk
      >>> sk.memory(jnp.cos, jnp.ones((256,), jnp.float32)).arguments
      1024
    """
    compiled = compiling.compile_program(fun, args, kwargs).compiled
    try:
        analysis = compiled.memory_analysis()
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
        raise RuntimeError(_no_analysis(compiled)) from error
    if analysis is None:
        raise RuntimeError(_no_analysis(compiled))
    peak = getattr(analysis, "peak_memory_in_bytes", None)
    return MemoryReport(
        arguments=analysis.argument_size_in_bytes,
        outputs=analysis.output_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        aliased=analysis.alias_size_in_bytes,
        generated_code=analysis.generated_code_size_in_bytes,
        peak=peak or None,  # backends that do not track it say 0
    )


def _no_analysis(compiled: Any) -> str:
    return (
        f"the backend {_platform(compiled)!r} gives no memory analysis of its programs. Compile for another: "
        "simulated CPU devices, or a described TPU or GPU (jax.experimental.topologies)."
    )


def _platform(compiled: Any) -> str:
    for sharding in jax.tree.leaves(getattr(compiled, "input_shardings", ())):
        for device in getattr(sharding, "device_set", ()):
            return device.platform
    return jax.default_backend()
