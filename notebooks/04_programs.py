# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 4. Partition a program, and read it
#
# You have a function for one device: a whole training step, say. You decide where its arguments live. What has to
# travel follows from that, and `sk.partition` works it out: it gives a placement to every value on the way, and moves
# something only where an operation can't go on without. Then it shows you the result, line by line. (Notebook 1
# explains the words.)

# %%
# The CPU plays eight devices, whatever else is here; this must be said before JAX is used for the first time.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import shardkit as sk

# %% [markdown]
# ## The function
#
# Two matrices, a ReLU between them, a squared error, and one step of gradient descent. There is nothing about devices
# in it.


# %%
def step(params, x, y):
    def loss(params):
        hidden = jax.nn.relu(x @ params["up"])
        return jnp.mean((hidden @ params["down"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


random = np.random.default_rng(0)
params = {
    "up": random.normal(0, 0.1, (16, 64)).astype(np.float32),
    "down": random.normal(0, 0.1, (64, 8)).astype(np.float32),
}
x, y = (random.normal(0, 1, (32, n)).astype(np.float32) for n in (16, 8))

# %% [markdown]
# ## Where its arguments live
#
# The mesh is two by four. Along `"dp"` the *batch* is cut (dim 0 of `x` and `y`). Along `"tp"` the *model* is cut:
# `up` by columns and `down` by rows, so that each device has 16 of the 64 hidden units.

# %%
mesh = sk.make_mesh({"dp": 2, "tp": 4})
model = {"up": {"tp": sk.Shard(1)}, "down": {"tp": sk.Shard(0)}}
batch = {"dp": sk.Shard(0)}
sk.show(sk.shard_tensor(params["up"], model["up"], mesh))

# %% [markdown]
# ## The same numbers
#
# `sk.partition` makes a function of the same arguments. First of all: it does the same.

# %%
train = sk.partition(step, (model, batch, batch), mesh=mesh)
new, value = train(params, x, y)
expected, expected_value = step(params, x, y)
np.testing.assert_allclose(value, expected_value, rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), new, expected)
print(f"loss {value:.4f}, on one device {expected_value:.4f}")

# %% [markdown]
# ## Reading the program
#
# `.program` is what will run. Each row is a value: its shape, the *block* of it that one device holds, and where it is
# (`[dp, tp]`: dim 0 is cut over dp, dim 1 over tp). Rows in colour are what was inserted, the only lines that
# communicate. Look for "sum over": those values are Partial, and you can follow them down to where they are summed. The
# last column is the line in the cell that defines `step` (Jupyter may put a long number in place of the word "cell").

# %%
program = train.program(params, x, y)
program

# %% [markdown]
# Four reshards, which is what the textbook has. Each knows the operation that left its value Partial:

# %%
names = {"tp": "hidden units", "dp": "examples"}
for moved in program.reshards:
    ((axis, maker),) = moved.made_by.items()
    print(f"{moved.bytes:>6,} bytes over {axis} ({names[axis]}); made Partial by {maker}")
assert len(program.reshards) == program.collectives == 4

# %% [markdown]
# - `hidden @ down` sums over hidden units, which are cut: that sum is taken at once, as the error is squared next.
# - The gradients of `down` and `up` are sums over the batch, which is cut: they are scaled by 0.1 while they are still
#   Partial, and summed just before they meet the parameters.
# - The loss is a mean over the batch: one number.
#
# There is no collective for the *hidden* layer at all: its units stay where they are, forward and back.
#
# ## Is it true?
#
# The program is compiled as it is printed. The compiler's own count agrees:

# %%
report = sk.collectives(lambda *args: train(*args), params, x, y)
assert report.bytes() == program.bytes_per_device
print(f"promised {program.bytes_per_device:,} bytes, compiled {report.bytes():,}")

# %% [markdown]
# ## What if?
#
# Nothing has to run for an answer, so it's cheap to ask about other placements. Take a larger model (256 to 1024 to
# 256 units, 512 examples), given by its shapes alone, and four ways to place it:


# %%
def shapes(*size):
    return jax.ShapeDtypeStruct(size, "float32")


large = {"up": shapes(256, 1024), "down": shapes(1024, 256)}, shapes(512, 256), shapes(512, 256)
everywhere = {"dp": sk.Shard(0), "tp": sk.Shard(0)}
ways = {
    "batch over both axes": ({"up": {}, "down": {}}, everywhere),
    "batch over dp only": ({"up": {}, "down": {}}, batch),
    "up by columns, down by rows": (model, batch),
    "up by rows, down by columns": (
        {"up": {"tp": sk.Shard(0)}, "down": {"tp": sk.Shard(1)}},
        batch,
    ),
}
programs = {
    name: sk.partition(step, (where, data, data), mesh=mesh).program(*large)
    for name, (where, data) in ways.items()
}

# %%
received = [p.bytes_per_device / 2**20 for p in programs.values()]
kept = [
    sum(4 * np.prod(sk.Layout(mesh, where[k]).local_shape(large[0][k].shape)) for k in where)
    / 2**20
    for where, _ in ways.values()
]
fig, axes = plt.subplots(1, 2, figsize=(9, 2.4), sharey=True, layout="constrained")
titles = ("MiB received in a step", "MiB of parameters kept")
for ax, sizes, title, color in zip(
    axes, (received, kept), titles, ("#e08a4f", "#0b5f70"), strict=True
):
    ax.bar_label(ax.barh(list(ways), sizes, color=color), fmt="%.2f", padding=4)
    ax.set(title=f"one device: {title}", xlim=(0, 1.25 * max(sizes)), xticks=[])
    ax.spines[["top", "right", "bottom"]].set_visible(False)
axes[0].invert_yaxis()
plt.show()

# %% [markdown]
# Columns and then rows receives least and keeps a quarter of the parameters. The other way round keeps as little, but
# the program has more to move:

# %%
for name, p in programs.items():
    kinds = [kind for moved in p.reshards for kind in moved.collectives]
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    print(f"{name:<28} {counted}")
best = "up by columns, down by rows"
assert min(programs, key=lambda name: programs[name].bytes_per_device) == best

# %% [markdown]
# ## Saying more
#
# `out_placements` says where results shall be. Ask for the new `up` cut over dp as well, and the sum of its gradient
# becomes a reduce-scatter, which receives half as much (notebook 1 has the table):

# %%
cut = {"up": {"tp": sk.Shard(1), "dp": sk.Shard(0)}, "down": model["down"]}
scattered = sk.partition(step, (model, batch, batch), (cut, {}), mesh=mesh).program(*large)
for p in (programs[best], scattered):
    moves = [(kind, moved.bytes) for moved in p.reshards for kind in moved.collectives]
    sent = ", ".join(f"{kind} {size / 1024:.0f} KiB" for kind, size in moves if size > 1024)
    print(f"{p.bytes_per_device / 2**20:.2f} MiB: {sent}")
saved = programs[best].bytes_per_device - scattered.bytes_per_device
assert saved == 256 * 1024 * 4 // 4 // 2

# %% [markdown]
# `sk.constrain` says it of a value inside the function; `sk.infer_gradient_placements` tells of each parameter over
# which axes its gradient is Partial. What no rule knows is run whole on every device, and the program says so.
#
# Next: [5. Plan a pod from a laptop](05_pod.ipynb).
