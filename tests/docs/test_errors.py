"""The table of docs/errors.md has the real texts: each message in it is raised here, and nothing else is."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax import numpy as jnp

import shardkit as sk
from shardkit.checkpoint.writing import Handler

sys.path.insert(0, str(Path(__file__).parent))

from pages import read

PATTERNS = re.findall(r"(?m)^\| `(\w+Error: .*?)` \| .+? \| .+? \|$", read("docs/errors.md"))
NUMBERS = ("NHWC", "HWIO", "NHWC")


def mesh():
    return sk.make_mesh({"sp": 4})


def partial():
    sums = sk.local_map(lambda x: x.sum(0), {"sp": sk.Shard(0)}, {"sp": sk.Partial()}, mesh())
    return sums(jnp.ones((8, 4), "float32"))


def conv(padding="SAME", spatial_axes=None, **options):
    x, kernel = jnp.ones((1, 4, 8, 2)), jnp.ones((3, 3, 2, 2))
    call = {"dimension_numbers": NUMBERS, "spatial_axes": spatial_axes or {"sp": "W"}, "mesh": mesh()}
    return sk.ring_conv(x, kernel, (1, 1), padding, **call, **options)


def plan(**plans):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(4, 6, rngs=rngs), nnx.LayerNorm(6, rngs=rngs)

    return sk.parallelize(Net(nnx.Rngs(0)), plans, mesh())


def gradients(loss=lambda w, x: jnp.mean(x @ w), rows=8, **options):
    return sk.value_and_grad(loss, batch_axes="sp", mesh=mesh(), **options)(jnp.ones(3), jnp.ones((rows, 3)))


def in_shard_map():
    def body(block):
        return sk.shard_tensor(block, {"sp": sk.Shard(0)}, mesh())

    jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=jax.P("sp"), out_specs=jax.P("sp")))(jnp.ones(8))


def launched():
    """A mesh of all processes, in one of two that were started together and aren't connected."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHARDKIT_NUM_PROCESSES", "2")
        sk.make_mesh({"dp": 16})


def interfered(path):
    """A save whose folder another process takes away."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Handler, "finalize", lambda self, directory: (directory / "none").unlink())
        sk.save(path, {"w": jnp.ones(4)}, step=1)


@jax.custom_vjp
def own_derivative(x):
    return x


own_derivative.defvjp(lambda x: (x, None), lambda _, g: (g * jnp.ones(6),))


def update(gradients, weights):
    tx = optax.adam(1.0)
    return tx.update({"w": gradients}, tx.init({"w": weights}), {"w": weights})


def with_module(loss, **options):
    module = nnx.Sequential(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Dropout(0.5, rngs=nnx.Rngs(0)))
    step = sk.value_and_grad(loss, batch_axes="sp", batch_argnums=2, mesh=mesh(), **options)
    return step(jnp.float32(1), module, jnp.ones((8, 3), jnp.float32))


def printing(x):
    jax.debug.print("{}", x)
    return x + 1


def scaled(scale):
    return sk.ring_scale_and_translate(
        jnp.ones(8), (8,), (0,), scale, jnp.zeros(1), "linear", spatial_axes={"sp": 0}, mesh=mesh()
    )


def saved(path):
    sk.save(path, {"w": jnp.ones(4)}, step=1)
    return path


def without_compiler():
    if importlib.util.find_spec("libtpu") is not None:
        pytest.skip("the compiler is installed")
    sk.target_mesh("tpu:v5e:2x4", {"dp": 8})


def attention(length=8, heads=2):
    x = jnp.ones((1, length, heads, 4))
    return sk.all_to_all_attention(x, x, x, axis="sp", mesh=mesh())


# By what they show; each message of the table belongs to one.
CASES = {
    "no mesh": lambda _: sk.shard_tensor(jnp.ones(4), [sk.Shard(0)]),
    "too few devices": lambda _: sk.make_mesh({"dp": 16}),
    "launched alone": lambda _: launched(),
    "jax.make_mesh's form": lambda _: sk.make_mesh((2, 4)),
    "padded custom_vjp": lambda _: jax.grad(lambda x: own_derivative(x).sum())(
        sk.shard_tensor(jnp.ones(6), {"sp": sk.Shard(0)}, mesh(), uneven="pad")
    ),
    "Partial in jax.lax": lambda _: jax.nn.sigmoid(partial()),
    "Partial in optax": lambda _: update(partial(), jnp.ones(4, "float32")),
    "devices that don't split": lambda _: sk.make_mesh({"dp": 3, "sp": -1}),
    "unknown axis": lambda _: sk.shard_tensor(jnp.ones(4), {"tp": sk.Shard(0)}, mesh()),
    "no such dim": lambda _: sk.shard_tensor(jnp.ones(4), {"sp": sk.Shard(1)}, mesh()),
    "unknown reduction": lambda _: sk.Partial("average"),
    "doesn't divide": lambda _: sk.shard_tensor(jnp.ones(6), {"sp": sk.Shard(0)}, mesh()),
    "on no mesh": lambda _: sk.placements(jnp.ones(4)),
    "under jit": lambda _: jax.jit(lambda x: sk.placements(x))(jnp.ones(4)),
    "in shard_map": lambda _: in_shard_map(),
    "not linear": lambda _: jnp.exp(partial()),
    "product of Partials": lambda _: partial() * partial(),
    "Partial of a whole": lambda _: sk.shard_tensor(jnp.ones(4), {"sp": sk.Partial()}, mesh()),
    "stacked Partial": lambda _: jax.lax.scan(lambda c, _: (c, partial()), 0, None, length=3)[1].reduce(),
    "unreduced on Auto": lambda _: sk.to_unreduced(partial()),
    "elsewhere": lambda _: sk.local_map(lambda x: x, {"sp": sk.Shard(0)}, {"sp": sk.Shard(0)}, mesh())(
        sk.shard_tensor(jnp.ones((8, 8)), {"sp": sk.Shard(1)}, mesh())
    ),
    "unknown spatial axis": lambda _: conv(spatial_axes={"tp": "W"}),
    "unknown letter": lambda _: conv(spatial_axes={"sp": "D"}),
    "unknown mode": lambda _: conv(padding_mode="wrap"),
    "wide reflection": lambda _: conv([(1, 1), (20, 20)], padding_mode="reflect"),
    "halo outside": lambda _: sk.halo_exchange(jnp.ones(8), "sp", 0, 1, 1),
    "callback in a region": lambda _: sk.spatial.region(printing, spatial_axes={"sp": 0}, mesh=mesh())(jnp.ones(8)),
    "traced scale": lambda _: jax.jit(scaled)(jnp.ones(1)),
    "heads": lambda _: attention(),
    "zigzag": lambda _: sk.to_zigzag(jnp.ones((1, 12)), axis="sp", mesh=mesh()),
    "argument doesn't divide": lambda _: sk.partition(lambda x: x + 1, {"sp": sk.Shard(0)}, mesh=mesh())(jnp.ones(6)),
    "callback": lambda _: sk.partition(printing, {"sp": sk.Shard(0)}, mesh=mesh())(jnp.ones(8)),
    "looks at values of a program": lambda _: sk.partition(
        lambda x: x if x.sum() > 0 else -x, {"sp": sk.Shard(0)}, mesh=mesh()
    )(jnp.ones(4)),
    "other results": lambda _: sk.partition(lambda x: x, {}, {"a": {}}, mesh=mesh())(jnp.ones(4)),
    "looks at values": lambda _: sk.explain(lambda x: x if x.sum() > 0 else -x, jnp.ones(4)),
    "other collectives": lambda _: sk.assert_collectives(
        jnp.sum, sk.shard_tensor(jnp.ones(8), {"sp": sk.Shard(0)}, mesh()), all_reduce=0
    ),
    "no compiler": lambda _: without_compiler(),
    "unknown target": lambda _: sk.target_mesh("tpu:v9:2x4", {"dp": 8}),
    "batch": lambda _: gradients(rows=6),
    "microbatches": lambda _: gradients(microbatches=3),
    "no scalar": lambda _: gradients(lambda w, x: x @ w),
    "lost changes": lambda _: with_module(lambda w, module, x: w * jnp.mean(module(x))),
    "a key in aux": lambda _: with_module(lambda w, m, x: (w * jnp.mean(m(x)), nnx.state(m)), has_aux=True),
    "stage 2 all_reduce": lambda _: sk.shard_optimizer(
        optax.sgd(1.0), sk.ShardingStage2("sp"), fuse="all_reduce", mesh=mesh()
    ),
    "unknown fuse": lambda _: sk.reduce_gradients(jnp.ones(2), "gather", axis="sp", mesh=mesh()),
    "no such layer": lambda _: plan(upp=sk.ColWiseParallel("sp")),
    "wrong layer": lambda _: plan(norm=sk.ColWiseParallel("sp")),
    "features": lambda _: plan(up=sk.ColWiseParallel("sp")),
    "no plan": lambda _: plan(up="column"),
    "last batch": lambda _: sk.shard_dataloader(np.arange(10), {"sp": sk.Shard(0)}, mesh(), batch_size=4),
    "batch size": lambda _: sk.shard_dataloader(np.arange(12), {"sp": sk.Shard(0)}, mesh(), batch_size=6),
    "part of a batch": lambda _: sk.shard_batch(np.arange(6), {"sp": sk.Shard(0)}, mesh()),
    "no checkpoint": lambda path: sk.restore(path, {"w": jnp.ones(4)}),
    "checkpoint is there": lambda path: sk.save(saved(path), {"w": jnp.ones(4)}, step=1),
    "another process": interfered,
    "other target": lambda path: sk.restore(saved(path), {"w": jnp.ones(5)}),
    "not finite": lambda _: sk.check_finite({"loss": jnp.array(jnp.nan)}, "the loss", step=3),
    "process number": lambda _: sk.initialize("127.0.0.1:1", 2, 5),
}


def fits(pattern, text):
    """Whether a text is the pattern's, whose "..." stand for anything, however lines are broken."""
    words = " ".join(text.split())
    return re.fullmatch(".+?".join(re.escape(part) for part in pattern.split("...")), words) is not None


@pytest.mark.parametrize("name", CASES)
def test_is_in_the_table_once(name, tmp_path):
    with pytest.raises(Exception, match=r".") as raised:  # its type and its words are in the table
        CASES[name](tmp_path)
    kinds = [kind.__name__ for kind in type(raised.value).__mro__]
    texts = [f"{kind}: {raised.value}" for kind in kinds]
    matching = [pattern for pattern in PATTERNS if any(fits(pattern, text) for text in texts)]
    matching = [p for p in matching if not any(q != p and fits(p, q) for q in matching)]  # the one that says most
    assert len(matching) == 1, "\n".join([texts[0], *matching])


def test_there_is_a_case_for_each_message():
    assert len(PATTERNS) == len(set(PATTERNS)) == len(CASES)


def test_the_table_is_read_whole():
    rows = [line for line in read("docs/errors.md").splitlines() if line.startswith("| `")]
    assert len(rows) == len(PATTERNS) > 40


@pytest.mark.parametrize(
    ("pattern", "text", "same"),
    [
        ("E: a ... c", "E: a b c", True),
        ("E: a ... c", "E: a\n  b c", True),
        ("E: a ... c", "E: a b c d", False),
        ("E: a", "E: a b", False),
    ],
)
def test_fits(pattern, text, same):
    assert fits(pattern, text) is same
