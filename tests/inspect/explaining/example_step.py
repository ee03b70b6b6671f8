"""A training step with something of everything, and the text that each backend's compiler makes of it.

The stored texts are what this prints on a machine with both extras:

    python tests/inspect/explaining/example_step.py cpu tpu:v5e:2x4 gpu:h100:8
"""

import gzip
import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import shardkit as sk

AXES = {"dp": 2, "sp": 4}
FOLDER = pathlib.Path(__file__).parent / "hlo"


def example(mesh, ring):
    """A grouped convolution over a cut width, a mean over it, layers in a loop that "dp" cuts, gradients, an update.

    Args:
      mesh: has the axes ``AXES``.
      ring: the convolution exchanges halos; else it's left to XLA, which gathers.

    Returns:
      The jitted step and its arguments.
    """

    def conv(x, kernel):
        how = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 2}
        if not ring:
            return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", **how)
        return sk.ring_conv(x, kernel, (1, 1), "SAME", **how, spatial_axes={"sp": "W"}, mesh=mesh)

    def step(params, x):
        def loss(params):
            h = jnp.tanh(conv(x, params["kernel"])).mean((1, 2))
            h, _ = jax.lax.scan(lambda h, layer: (jnp.tanh(h @ layer), None), h, params["layers"])
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    def array(shape, *spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    params = {"kernel": array((3, 3, 4, 16)), "layers": array((3, 16, 16), None, "dp")}
    return jax.jit(step, donate_argnums=0), (params, array((8, 8, 32, 8), "dp", None, "sp"))


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    for target in sys.argv[1:]:
        where = sk.make_mesh(AXES) if target == "cpu" else sk.target_mesh(target, AXES)
        for ring in (True, False):
            function, arguments = example(where, ring)
            text = function.lower(*arguments).compile().as_text()
            name = f"{target.split(':')[0]}_{'ring' if ring else 'plain'}.txt.gz"
            (FOLDER / name).write_bytes(gzip.compress(text.encode(), mtime=0))
