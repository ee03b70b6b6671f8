"""`Checkpointer`: checkpoints for a training loop, written while it goes on."""

from __future__ import annotations

import contextlib
import math
import os
import warnings
from typing import Any

import jax
import orbax.checkpoint as ocp

from shardkit.checkpoint.errors import CheckpointError
from shardkit.checkpoint.preemption import Preemption
from shardkit.checkpoint.restoring import restore_step
from shardkit.checkpoint.saving import start, told
from shardkit.checkpoint.steps import (
    checked_count,
    checked_step,
    delete_leftovers,
    delete_old,
    finish_replacing,
    folder_to_write,
    put_aside,
    release,
    replace,
    steps_in,
)
from shardkit.checkpoint.together import CHANNEL, together
from shardkit.checkpoint.writing import Handler
from shardkit.hosts import exchange, progress


class Checkpointer:
    """Saves a training loop's state while it goes on, keeps the newest few, and finds the way back.

    A save copies arrays from the devices and returns; files are written meanwhile, under another name until all of
    them are there. A checkpoint is whole or it's absent. Every process calls every method, in the same order. One job
    at a time writes to a folder; any number may read.

    Args:
      path: a folder, the same for all processes, which all of them can see; one below it for each step. A cloud's
        path, too, where orbax can write there.
      every: save at steps that this divides, and when the job is asked to end.
      keep: how many whole checkpoints stay; None: all.
      preemption: whether SIGTERM makes ``save`` save, wait, and set ``preempted``. Until ``close`` it then doesn't
        end the program by itself. Python lets only the main thread listen for it.
      timeout: how long one save may take, in seconds, before processes stop waiting for each other.

    Attributes:
      preempted: the job was asked to end, and its state is saved: leave the loop.

    Raises:
      ValueError: ``every`` or ``keep`` is no integer of 1 or more, ``timeout`` isn't above 0, or a path that orbax
        can't write to.

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
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int | None = 3,
        preemption: bool = True,
        timeout: float = 1200.0,
    ):
        every = checked_count("every", every)
        keep = None if keep is None else checked_count("keep", keep, ", or None to keep all")
        if not 0 < timeout < math.inf:
            raise ValueError(f"timeout={timeout!r}: give seconds, more than 0")
        self._path = folder_to_write(path)
        self._every, self._keep = every, keep
        self._writing: tuple[Any, int] | None = None  # where to, and which step
        self._closed = False
        # The folder must be there when the handler begins, which is before the arrays are written.
        options = ocp.AsyncOptions(timeout_secs=math.ceil(timeout), create_directories_asynchronously=False)
        self._writer = ocp.AsyncCheckpointer(Handler(), async_options=options)
        self._preemption = Preemption() if preemption else None
        self.preempted: bool = False

    @property
    def path(self) -> str:
        """The folder, as text."""
        return os.fspath(self._path)

    def steps(self) -> list[int]:
        """The steps that are there, ascending. One that is being written isn't."""
        return steps_in(self._path)

    def save(self, tree: Any, step: int, *, force: bool = False) -> bool:
        """Save after a step, if it's one of those to save after. Call it after every step.

        Args:
          tree: as ``sk.save`` takes it.
          step: how many steps are done.
          force: save whatever the step is, over one that is there, which stays until the new one is whole and
            waited for.

        Returns:
          Whether it was saved: its copy was made, and it's being written.

        Raises:
          CheckpointError: this or the save before it could not be written; ``close`` was called.
          ValueError: the step is no integer of 0 or more.
        """
        if self._closed:
            raise CheckpointError(f"this Checkpointer of {self.path} is closed; make another one to save step {step}")
        step = checked_step(step)
        last = self._preemption is not None and self._preemption.reached(step)
        due = force or last or step % self._every == 0
        if due:
            self.wait()
            self._start(tree, step, force)
            progress("checkpoint of step", step)
        if last:
            self.wait()
            self.preempted = True
        return due

    def _start(self, tree: Any, step: int, force: bool) -> None:
        try:
            self._writing = start(self._writer, self._path, tree, step, self._tidy, force), step
        except Exception:
            self._give_up(step)
            raise

    def resume(self, target: Any, *, damaged: str = "error") -> tuple[Any, int]:
        """Go on from the newest checkpoint: (tree, steps done), or (target, 0) where there's none.

        Args:
          target: as ``sk.restore`` takes it.
          damaged: what if the newest is damaged: "error", or "previous": warn, take the newest whole one, and put
            newer ones aside as ``<step>.damaged``.

        Returns:
          The tree as ``sk.restore`` returns it, and its step.

        Raises:
          CheckpointError: what was being written couldn't be; a checkpoint is damaged, or the target differs from it.
          ValueError: another ``damaged``.
        """
        if damaged not in ("error", "previous"):
            raise ValueError(f'damaged={damaged!r}: give "error" or "previous"')
        self.wait()
        with together(f"looking into {self.path}"), told(self._path, "could not look into"):
            if jax.process_index() == 0:
                finish_replacing(self._path)
            steps = self.steps()
        steps = exchange(CHANNEL, steps)[0]
        step = steps[-1] if steps else None
        while step is not None:
            try:
                found = restore_step(self.path, target, step, partial=False, verify=True)
            except CheckpointError as error:
                if damaged == "error" or error.file is None or error.previous is None or error.previous > step:
                    raise  # a newer one was tried
                warnings.warn(f"{error}. Going on from there", stacklevel=2)
                step = error.previous
            else:
                # The others must not look for a name that is only being freed.
                with together(f"putting damaged checkpoints of {self.path} aside"):
                    if jax.process_index() == 0:
                        put_aside(self._path, [s for s in steps if s > step])
                return found
        return target, 0

    def restore(self, target: Any, step: int | None = None) -> Any:
        """The tree of a checkpoint in this folder, as a target has it, once what is being written is there.

        Args:
          target: a tree of the saved one's names, shapes and dtypes, as ``sk.restore`` takes it.
          step: which one; None: the newest.

        Returns:
          The tree, with the target's structure, meshes and placements.

        Raises:
          CheckpointError: there's no such checkpoint, it's damaged, or the target differs from it; what was being
            written couldn't be.
        """
        self.wait()
        return restore_step(self.path, target, step, partial=False, verify=True)[0]

    def wait(self) -> None:
        """Waits until what is being written is there.

        Raises:
          CheckpointError: it could not be written.
        """
        try:
            with told(self._path):
                self._writer.wait_until_finished()
        except Exception:  # not on Ctrl-C, when it's still being written
            # The first error ends orbax's waiting, while a thread of its may yet write into what is deleted below.
            with contextlib.suppress(Exception):
                self._writer.wait_until_finished()
            written, self._writing = self._writing, None
            if written is not None:
                self._give_up(written[1])
            raise
        written, self._writing = self._writing, None
        if written is not None:
            with told(self._path):
                self._take_over(*written)
        with told(self._path, "old checkpoints could not be deleted from"):
            if self._keep is not None and jax.process_index() == 0 and self._path.is_dir():
                delete_old(self._path, self._keep)

    def close(self) -> None:
        """Waits until what is being written is there, and listens for SIGTERM no more; a second time does nothing.

        Raises:
          CheckpointError: it could not be written.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.wait()
        except BaseException:
            with contextlib.suppress(Exception):  # which would hide the first one
                self._writer.close()
            raise
        else:
            with told(self._path):
                self._writer.close()
        finally:
            if self._preemption is not None:
                self._preemption.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _give_up(self, step: int) -> None:
        """Delete what was written of a step; a disk may be full of it."""
        release(self._path / str(step), self._writer)
        with contextlib.suppress(OSError):
            self._tidy()

    def _take_over(self, directory: Any, step: int) -> None:
        """What was written beside an older one of the same step takes its place."""
        try:
            if jax.process_index() == 0 and directory.name != str(step):
                replace(self._path, step)
        finally:
            release(self._path / str(step), self._writer)

    def _tidy(self, directory: Any = None) -> None:
        """What ends of earlier jobs left is deleted where it's known that none of it is being written: at a save."""
        if jax.process_index() == 0 and self._path.is_dir():
            delete_leftovers(self._path)
