"""`Checkpointer`: checkpoints for a training loop, written while it goes on."""

from __future__ import annotations

import os
import warnings
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.preemption import Preemption
from shardkit.checkpoint.restoring import restore_step
from shardkit.checkpoint.saving import start, told
from shardkit.checkpoint.steps import TEMPORARY, delete_leftovers, delete_old, folder, put_aside, steps_in
from shardkit.checkpoint.writing import Handler
from shardkit.hosts import exchange, progress


class Checkpointer:
    """Saves a training loop's state while it goes on, keeps the newest few, and finds the way back.

    A save copies arrays from the devices and returns; files are written meanwhile, under another name until all of
    them are there. A checkpoint is whole or it's absent. Every process calls every method, in the same order.

    Args:
      path: a folder; one below it for each step. A cloud's path, too, where orbax can write there.
      every: save at steps that this divides, and when the job is asked to end.
      keep: how many whole checkpoints stay; None: all.
      preemption: whether SIGTERM makes ``save`` save, wait, and set ``preempted``. Until ``close`` it then doesn't
        end the program by itself.
      timeout: how long one save may take, in seconds, before processes stop waiting for each other.

    Attributes:
      preempted: the job was asked to end, and its state is saved: leave the loop.

    Raises:
      ValueError: ``every`` or ``keep`` below 1.

    Example:
      >>> import tempfile, jax.numpy as jnp, shardkit as sk
      >>> with sk.Checkpointer(tempfile.mkdtemp(), every=2, keep=1) as checkpoints:
      ...     weights, done = checkpoints.resume(jnp.zeros(3))
      ...     for step in range(done + 1, 6):
      ...         weights = weights + 1
      ...         saved = checkpoints.save(weights, step)
      ...         if checkpoints.preempted:
      ...             break
      ...     checkpoints.wait()
      ...     checkpoints.steps(), checkpoints.restore(jnp.zeros(3)).tolist()
      ([4], [4.0, 4.0, 4.0])
    """

    def __init__(
        self,
        path: str | os.PathLike,
        *,
        every: int = 1,
        keep: int | None = 3,
        preemption: bool = True,
        timeout: float = 1200.0,
    ):
        for name, value in (("every", every), ("keep", keep)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give 1 or more{'' if name == 'every' else ', or None to keep all'}")
        self._path = folder(path)
        self._every, self._keep = every, keep
        # The folder must be there when the handler begins, which is before the arrays are written.
        options = ocp.AsyncOptions(timeout_secs=round(timeout), create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(Handler(), async_options=options)
        self._preemption = Preemption() if preemption else None
        self.preempted = False

    @property
    def path(self) -> str:
        """The folder."""
        return os.fspath(self._path)

    def steps(self) -> list[int]:
        """The steps that are there, ascending. One that is being written isn't."""
        return steps_in(self._path)

    def save(self, tree: Any, step: int, *, force: bool = False) -> bool:
        """Save after a step, if it's one of those to save after. Call it after every step.

        Args:
          tree: as ``sk.save`` takes it.
          step: how many steps are done.
          force: save whatever the step is, over one that is there, which is deleted first.

        Returns:
          Whether it was saved: its copy was made, and it's being written.

        Raises:
          CheckpointError: this or the save before it could not be written.
        """
        last = self._preemption is not None and self._preemption.reached(step)
        due = force or last or step % self._every == 0
        if due:
            self.wait()
            start(self._writer, self._path, tree, step, self._tidy, force)
            progress("checkpoint of step", step)
        if last:
            self.wait()
            self.preempted = True
        return due

    def resume(self, target: Any, *, damaged: str = "error") -> tuple[Any, int]:
        """Go on from the newest checkpoint: (tree, steps done), or (target, 0) where there's none.

        Args:
          target: as ``sk.restore`` takes it.
          damaged: what if the newest is damaged: "error", or "previous": warn, take the newest whole one, and put
            newer ones aside as ``<step>.damaged``.

        Raises:
          CheckpointError: as ``sk.restore``.
          ValueError: another ``damaged``.
        """
        if damaged not in ("error", "previous"):
            raise ValueError(f'damaged={damaged!r}: give "error" or "previous"')
        steps = exchange(f"steps in {self.path}", self.steps())[0]
        step = steps[-1] if steps else None
        while step is not None:
            try:
                found = restore_step(self.path, target, step, partial=False, verify=True)
            except CheckpointError as error:
                if damaged == "error" or error.file is None or error.previous is None:
                    raise
                warnings.warn(f"{error}. Going on from there", stacklevel=2)
                step = error.previous
            else:
                if jax.process_index() == 0:
                    put_aside(self._path, [s for s in steps if s > step])
                return found
        return target, 0

    def restore(self, target: Any, step: int | None = None) -> Any:
        """As ``sk.restore`` from this folder, once what is being written is there."""
        self.wait()
        return restore_step(self.path, target, step, partial=False, verify=True)[0]

    def wait(self) -> None:
        """Until what is being written is there.

        Raises:
          CheckpointError: it could not be written.
        """
        with told(self._path):
            self._writer.wait_until_finished()
        if self._keep is not None and jax.process_index() == 0 and self._path.is_dir():
            with told(self._path):
                delete_old(self._path, self._keep)

    def close(self) -> None:
        """Wait, and stop to listen for SIGTERM."""
        try:
            self.wait()
        finally:
            self._writer.close()
            if self._preemption is not None:
                self._preemption.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _tidy(self, directory: Any) -> None:
        """What ends of earlier jobs left is deleted where it's known that none of it is being written: at a save."""
        delete_leftovers(self._path, directory.name if directory.name.endswith(TEMPORARY) else "")
