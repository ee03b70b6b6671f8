"""A short use of each part, for an environment that has nothing but the package and what it needs."""

import sys
import tempfile
from pathlib import Path

import jax

jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402

import shardkit as sk  # noqa: E402

assert Path(sk.__file__).is_relative_to(sys.prefix), sk.__file__
mesh = sk.make_mesh({"dp": 2, "sp": 4})

rng = np.random.default_rng(0)
x, kernel = rng.normal(size=(2, 8, 18, 3)).astype("float32"), rng.normal(size=(3, 3, 3, 4)).astype("float32")
numbers = ("NHWC", "HWIO", "NHWC")
cut = sk.shard_tensor(x, {"dp": sk.Shard(0), "sp": sk.Shard(2)}, mesh, uneven="pad")
y = sk.ring_conv(cut, jnp.asarray(kernel), (1, 1), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"})
expected = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-5, atol=1e-5)

model = sk.parallelize(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), {"": sk.ColWiseParallel("sp")}, mesh)
assert sk.placements(model.kernel[...])[1] == sk.Shard(1)
tx = sk.shard_optimizer(optax.adamw(1e-3), sk.ShardingStage1("dp"), mesh=mesh)
params = sk.shard_params({"w": jnp.arange(16.0)}, "dp", mesh)

with tempfile.TemporaryDirectory() as folder:
    tree = {"params": params, "state": tx.init({"w": jnp.ones(16)})}
    sk.save(folder, tree, 3)
    restored = sk.restore(folder, jax.tree.map(jnp.zeros_like, tree))
    np.testing.assert_array_equal(jax.tree.leaves(restored)[0], jax.tree.leaves(tree)[0])

assert sk.__version__ == sys.argv[1]
