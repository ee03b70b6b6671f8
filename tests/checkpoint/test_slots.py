"""Names of values: those of the plain program, whatever wraps it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import shardkit as sk
from shardkit.checkpoint.slots import take_apart


def names(tree):
    return ["/".join(slot.path) for slot in take_apart(tree)[0]]


@pytest.fixture(scope="module")
def params():
    mesh = sk.make_mesh({"dp": 8})
    values = {"odd": np.arange(21.0).reshape(7, 3), "w": np.arange(64.0).reshape(8, 8)}
    return jax.tree.map(lambda x: sk.shard_tensor(x, {}, mesh), values)


STAGES = {"1": sk.ShardingStage1, "2": sk.ShardingStage2, "3": sk.ShardingStage3}


@pytest.mark.parametrize("stage", STAGES)
def test_state_of_a_sharded_optimizer_has_the_plain_names(params, stage):
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    if stage == "3":
        params = sk.shard_params(params, "dp")
    state = sk.shard_optimizer(tx, STAGES[stage]("dp")).init(params)
    plain = tx.init({"odd": jnp.zeros((7, 3)), "w": jnp.zeros((8, 8))})
    tree, wanted = {"params": params, "state": state}, {"params": {"odd": 0, "w": 0}, "state": plain}
    assert names(tree) == names(wanted)
    flat = {"/".join(s.path): (s.shape, s.layout) for s in take_apart(tree)[0] if s.layout != "plain"}
    assert flat["state/1/0/mu/odd"] == ((7, 3), "flat")
    assert ("params/odd" in flat) == (stage == "3")


def test_wrappers_within_wrappers(params):
    def wrapped(shard):
        inner = optax.masked(optax.adam(1e-3), {"odd": True, "w": False})
        return optax.chain(sk.master_weights(inner), shard(optax.sgd(0.1, momentum=0.9)))

    sharded = wrapped(lambda tx: sk.shard_optimizer(tx, sk.ShardingStage1("dp"))).init(params)
    assert names(sharded) == names(wrapped(lambda tx: tx).init(params))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.layers = nnx.List([nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)])
        self.tied = self.first


def test_a_module_its_state_and_a_parallelized_one_have_the_same_names():
    mesh = sk.make_mesh({"sp": 8})
    plain = Net(nnx.Rngs(0))
    expected = names(plain)
    assert "first/kernel" in expected
    assert "layers/0/mean" in expected
    assert "layers/1/rngs/key" in expected
    assert not any(name.startswith("tied") or name.endswith("value") for name in expected)
    assert sorted(names(nnx.state(plain))) == sorted(expected)
    other = Net(nnx.Rngs(0))
    sk.parallelize(other, {"first": sk.ConvParallel("sp", dim="W")}, mesh)
    assert names(other) == expected


def test_a_tree_is_put_together_again():
    module, counter = Net(nnx.Rngs(0)), Counter(3)
    tree = {"module": module, "list": [1, (2.5, "text")], "none": None, "data": counter}
    slots, build = take_apart(tree)
    new = [slot.value + 1 if slot.path[0] == "module" and "rngs" not in slot.path else slot.value for slot in slots]
    before = np.asarray(module.first.kernel.get_value())
    again = build(new)
    assert again["module"] is module
    assert again["data"] is counter
    assert again["list"] == [1, (2.5, "text")]
    assert again["none"] is None
    np.testing.assert_array_equal(module.first.kernel.get_value(), before + 1)
    assert module.tied.kernel is module.first.kernel


class Counter:
    """Something that has a state."""

    def __init__(self, count):
        self.count = count

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def test_optimizers_and_training_states_of_flax():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = names(nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param))
    assert "step" in found
    assert "opt_state/0/mu/kernel" in found
    state = TrainState.create(apply_fn=lambda: 0, params={"w": jnp.ones(2)}, tx=optax.sgd(0.1, momentum=0.9))
    assert names(state) == ["step", "params/w", "opt_state/0/trace/w"]


def test_two_values_of_one_name_are_refused():
    with pytest.raises(ValueError, match="have one name, 'a/1'; rename a key"):
        take_apart({"a": Both()})


@jax.tree_util.register_pytree_with_keys_class
class Both:
    def tree_flatten_with_keys(self):
        key = jax.tree_util.DictKey
        return [(key(1), 1.0), (key("1"), 2.0)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls()


def test_a_field_called_value_is_one_like_any_other():
    """States of line searches have one beside others."""
    found = names(optax.scale_by_backtracking_linesearch(5).init({"w": jnp.ones(2)}))
    assert {"value", "learning_rate"} <= set(found)


def test_boxes_of_linen_leave_no_trace():
    def make(initializer):
        layer = nn.Dense(4, kernel_init=initializer)
        return layer.init(jax.random.key(0), jnp.ones((2, 8)))

    ones = nn.initializers.ones
    boxed = make(nn.with_partitioning(ones, ("a", None)))
    assert names(boxed) == names(make(ones)) == ["params/bias", "params/kernel"]
    slots, build = take_apart(boxed)
    again = build([slot.value + 1 for slot in slots])
    assert again["params"]["kernel"].names == ("a", None)
    assert float(again["params"]["kernel"].value[0, 0]) == 2
