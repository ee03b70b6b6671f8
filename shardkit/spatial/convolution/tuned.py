"""What tuning a convolution found: the figures of every form, and the best. No JAX here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from shardkit.spatial.convolution.layers import Layer
from shardkit.spatial.convolution.table import Form

# What decides -> (heading, its value in that unit, how far from the least still counts as equal).
MEASURES = {
    "seconds": ("wall, ms", 1e-3, 0.05),
    "cycles": ("cycles, M", 1e6, 0.015),
    "temporaries": ("temporaries, MB", 1e6, 0.005),
}


@dataclasses.dataclass(frozen=True)
class Trial:
    """One form, and what became of it.

    Attributes:
      form: which.
      seconds: wall time, the median; None where nothing runs.
      cycles: the TPU compiler's estimate; None elsewhere.
      temporaries: bytes a device; None where the form can't run.
      reason: why it can't; None where it can.
    """

    form: Form
    seconds: float | None = None
    cycles: float | None = None
    temporaries: int | None = None
    reason: str | None = None

    def measure(self, by: str) -> float | None:
        """The figure that decides; None where there is none."""
        return getattr(self, by)


def best_of(trials: Iterable[Trial], by: str) -> Trial:
    """The trial with the least of ``by``; of those as good as that, the least temporaries; of these the plainest form.

    Times vary from run to run, so that of those as fast as the fastest the plainest form is taken at once.

    Example:
      >>> best_of([Trial(Form("concat"), cycles=3e6, temporaries=4), Trial(Form("overlap"), cycles=3e6, temporaries=3),
      ...          Trial(Form("blocks", 8), cycles=9e6, temporaries=1)], "cycles").form
      Form(method='overlap', chunks=0, major=False)

    Raises:
      ValueError: no trial has a figure.
    """
    left = [trial for trial in trials if trial.measure(by) is not None]
    if not left:
        raise ValueError(f"no form of this convolution has a figure for {by!r}, so none is best")
    for measure in [by] if by == "seconds" else dict.fromkeys((by, "temporaries")):
        least = min(trial.measure(measure) or 0 for trial in left)
        left = [t for t in left if (t.measure(measure) or 0) <= least * (1 + MEASURES[measure][2])]
    order = {"concat": 0, "overlap": 1, "blocks": 2}
    return min(left, key=lambda trial: (order[trial.form.method], trial.form.chunks, trial.form.major))


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What ``sk.spatial.tune_conv`` found; ``sk.spatial.forms`` takes it. Printed, it's a table.

    Attributes:
      layers: the convolution as ``ring_conv`` recognises it: more than one where the batch is cut over mesh axes that
        are the compiler's in one place and manual in another.
      by: what decided: "seconds", "cycles" (the TPU compiler's estimate) or "temporaries" (bytes).
      trials: the figures of each form; of one that can't run, the reason.
      auto: the form that ``method="auto"`` chooses by the table of the package.
      program: what was compiled, in words.
    """

    layers: tuple[Layer, ...]
    by: str
    trials: tuple[Trial, ...]
    auto: Form
    program: str

    @property
    def best(self) -> Form:
        """The best form."""
        return best_of(self.trials, self.by).form

    def __str__(self) -> str:
        columns = [(name, *MEASURES[name][:2]) for name in dict.fromkeys((self.by, "temporaries"))]
        width = max(len(str(t.form)) for t in self.trials) + 2
        lines = [self.program, "form".ljust(width) + "".join(heading.rjust(18) for _, heading, _ in columns)]
        best = best_of(self.trials, self.by)
        for trial in self.trials:
            line = str(trial.form).ljust(width)
            if trial.reason is not None:
                lines.append(f"{line}  can't run: {trial.reason}")
                continue
            for name, _, unit in columns:
                value = trial.measure(name)
                line += ("-" if value is None else f"{value / unit:,.3f}").rjust(18)
            notes = ["best"] * (trial is best) + ["auto"] * (trial.form == self.auto)
            lines.append(f"{line}  {', '.join(notes)}".rstrip())
        return "\n".join(lines)
