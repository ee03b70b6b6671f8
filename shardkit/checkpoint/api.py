"""`save` and `restore`: a tree to a folder and back, from any mesh to any other."""

from __future__ import annotations

import os
from typing import Any

from shardkit.checkpoint.checkpointer import Checkpointer
from shardkit.checkpoint.restoring import restore_step
from shardkit.checkpoint.steps import folder, newest_whole


def save(
    path: str | os.PathLike[str], tree: Any, step: int, *, keep: int | None = None, overwrite: bool = False
) -> None:
    """Save a tree as the checkpoint of a step, whole or not at all.

    It's on disk when this returns; ``sk.Checkpointer`` writes while the training goes on. Orbax writes the arrays, each
    process its own parts. Every process calls it.

    Args:
      path: a folder; the checkpoint is the folder ``path/step``.
      tree: arrays on any mesh, NumPy's, ``sk.Padded``, keys of ``jax.random``, numbers, text, Flax modules and
        optimizers, states of ``sk.shard_optimizer``, and objects with ``get_state`` and ``set_state`` (those of
        ``sk.shard_dataloader``, iterators of grain), in any pytree. Names in the checkpoint are those of the plain
        program: what shardkit adds to a tree isn't seen in them. Processes may differ in the states of such objects,
        which as many processes can then take over; in all else they must be the same.
      step: an integer, 0 or more.
      keep: how many of the newest whole checkpoints stay; None: all.
      overwrite: put it in the place of the checkpoint of the same step, if there's one, once it's whole.

    Raises:
      CheckpointError: it can't be written, or is there already; what was there before is still there.
      ValueError: the step or the path isn't one, two values have one name, or an array was deleted (donated).
      TypeError: a value that no checkpoint can hold, by name.
      ProcessMismatchError: processes save different things.

    Example:
      >>> import tempfile, jax.numpy as jnp, shardkit as sk
      >>> path = tempfile.mkdtemp()
      >>> sk.save(path, {"w": jnp.arange(4.0), "epoch": 2}, step=10)
      >>> sk.restore(path, {"w": jnp.zeros(4), "epoch": 0})
      {'epoch': 2, 'w': Array([0., 1., 2., 3.], dtype=float32)}
    """
    with Checkpointer(path, keep=keep, preemption=False) as one:
        one.save(tree, step, force=overwrite)


def restore(
    path: str | os.PathLike[str], target: Any, *, step: int | None = None, partial: bool = False, verify: bool = True
) -> Any:
    """The tree of a checkpoint, as a target has it: its structure, meshes, placements and axis types.

    The number of processes, devices, mesh axes and their names may all be others than when it was saved. Every
    process calls it.

    Args:
      path: the folder that ``sk.save`` was given, or that of one step in it.
      target: a tree with the names, shapes and dtypes of the saved one: arrays as they're wanted, or
        ``jax.ShapeDtypeStruct`` with a sharding. Their values don't matter. Modules, and objects with ``set_state``,
        are changed in place, and are in the result.
      step: which one; None: the newest.
      partial: leave unread what the checkpoint has beyond the target (the optimizer, say).
      verify: compare all files with their digests first; without it only that they are all there.

    Returns:
      The tree. Nothing in the target is changed unless all of it could be read.

    Raises:
      CheckpointError: there's no checkpoint; it's damaged (``.file`` names the file, ``.previous`` the step of one
        that is whole); the target differs from it, where all differences are listed.

    Example:
      >>> import tempfile, jax.numpy as jnp, shardkit as sk
      >>> path, mesh = tempfile.mkdtemp(), sk.make_mesh({"dp": 1})
      >>> sk.save(path, {"w": jnp.arange(4.0)}, step=1)
      >>> target = {"w": sk.shard_tensor(jnp.zeros(4), {"dp": sk.Shard(0)}, mesh)}
      >>> sk.placements(sk.restore(path, target)["w"])
      (Shard(dim=0),)
    """
    return restore_step(path, target, step, partial=partial, verify=verify)[0]


def latest_step(path: str | os.PathLike[str]) -> int | None:
    """The step of the newest checkpoint whose files are all there. It reads no array and compares no digests.

    Args:
      path: the folder that ``sk.save`` was given.

    Returns:
      An integer; None if there's no such checkpoint, or no folder.

    Raises:
      ValueError: an empty path.

    Example:
      >>> import tempfile, jax.numpy as jnp, shardkit as sk
      >>> path = tempfile.mkdtemp()
      >>> sk.save(path, {"w": jnp.zeros(4)}, step=10)
      >>> sk.latest_step(path), sk.latest_step(tempfile.mkdtemp())
      (10, None)
    """
    return newest_whole(folder(path))
