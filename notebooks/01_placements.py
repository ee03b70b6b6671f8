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
# # 1. Placements, and what they cost
#
# An array that is too large for one device, or too slow there, is spread over several. Then two questions matter:
# *who holds what*, and *what has to travel* when the next step needs it held in another way. This notebook answers
# both with pictures, on a laptop. You need to know NumPy; nothing about devices.

# %%
# The CPU plays eight devices, whatever else is here; this must be said before JAX is used for the first time.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt

import shardkit as sk

# %% [markdown]
# ## A mesh: devices in rows and columns
#
# Devices get coordinates, and the directions get names. Here there are two rows of four: `"dp"` goes down, `"tp"` goes
# across. (The names are yours to choose; these two are customary, for *data* and *tensor parallel*.)

# %%
mesh = sk.make_mesh({"dp": 2, "tp": 4})

# %% [markdown]
# ## Shard: everyone holds a part
#
# For each mesh axis we say what happens to the array along it. `Shard(0)` cuts dim 0 of the array into as many parts as
# the axis has devices. With both axes cutting, every device holds an eighth.

# %%
x = jnp.arange(64.0).reshape(8, 8)
x = sk.shard_tensor(x, {"dp": sk.Shard(0), "tp": sk.Shard(1)}, mesh)
sk.show(x)

# %% [markdown]
# It's still one array: `x[3, 5]`, `x.sum()` and all of `jax.numpy` work on it. What device 6 holds is rows 4 to 8 of
# columns 4 to 6:

# %%
print(sk.to_local(x)[6])
assert x[3, 5] == 29 and x.sum() == 63 * 64 / 2

# %% [markdown]
# ## Replicate: everyone holds a copy
#
# An axis that isn't mentioned cuts nothing: all its devices hold the same. Below, each pair of rows is held twice, once
# in either half of the mesh.

# %%
sk.show(sk.shard_tensor(x, {"tp": sk.Shard(0)}, mesh))

# %% [markdown]
# Copies cost memory. A matrix of 1024 x 1024 float32 numbers has 4 MiB; this is what *one* device keeps of it:

# %%
choices = {
    "a copy on each": {},
    "cut over dp": {"dp": sk.Shard(0)},
    "cut over tp": {"tp": sk.Shard(0)},
    "cut over both": {"dp": sk.Shard(0), "tp": sk.Shard(1)},
}
blocks = {
    name: sk.Layout(mesh, places).local_shape((1024, 1024)) for name, places in choices.items()
}
held = {name: 4 * rows * columns / 2**20 for name, (rows, columns) in blocks.items()}
assert list(held.values()) == [4, 2, 1, 0.5]

fig, ax = plt.subplots(figsize=(6, 2), layout="constrained")
ax.bar_label(ax.barh(list(held), list(held.values()), color="#0b5f70"), fmt="%g MiB", padding=4)
ax.set(title="one device keeps", xlim=(0, 4.6), xticks=[])
ax.invert_yaxis()
ax.spines[["top", "right", "bottom"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Partial: everyone holds a contribution
#
# The third placement is less obvious, and the most useful. Multiply two matrices whose *inner* dim is cut: each device
# multiplies its columns of `a` with its rows of `b`, and gets a matrix of the full size, which is not the product. The
# product is the *sum* of all eight. Until somebody takes that sum, the value is `Partial`.

# %%
line = sk.make_mesh({"x": 8})
a = sk.shard_tensor(jnp.arange(64.0).reshape(8, 8) / 64, {"x": sk.Shard(1)}, line)
b = sk.shard_tensor(jnp.eye(8)[::-1], {"x": sk.Shard(0)}, line)
product = sk.local_map(
    jnp.matmul, ({"x": sk.Shard(1)}, {"x": sk.Shard(0)}), {"x": sk.Partial()}, line
)(a, b)
sk.show(product)

# %% [markdown]
# Here are the eight contributions, and their sum. With the mirrored identity for `b`, device *i* knows just one column.

# %%
contributions = [*sk.to_local(product), product.reduce()]
fig, axes = plt.subplots(1, 9, figsize=(9, 1.5), layout="constrained")
for i, (ax, part) in enumerate(zip(axes, contributions, strict=True)):
    ax.imshow(part, cmap="viridis", vmin=0, vmax=1)
    ax.set(title=f"device {i}" if i < 8 else "= the sum", xticks=[], yticks=[])
    ax.title.set(fontsize=9, fontweight="normal" if i < 8 else "bold")
plt.show()
assert (product.reduce() == a @ b).all()

# %% [markdown]
# Why not add at once? Because what comes next may be just as happy with contributions: twice a sum is the sum of the
# doubled. Code that is linear works on the contributions, nothing is sent, and one sum at the end serves all of it.

# %%
later = 0.5 * product + product  # still eight contributions on eight devices
assert isinstance(later, sk.PartialArray)
assert (later.reduce() == 1.5 * (a @ b)).all()

# %% [markdown]
# ## Moving from one to another
#
# `sk.reshard` takes an array from any placement to any other. `sk.plan_reshard` says how, before anything is done.
# From rows to columns, say, each device keeps the corner that it already has and sends the rest to the others:

# %%
print(sk.plan_reshard((1024, 1024), "float32", {"x": sk.Shard(0)}, {"x": sk.Shard(1)}, line))

# %% [markdown]
# The price is what one device *receives*. Here are all the moves between four placements of our 4 MiB matrix.

# %%
places = {
    "copies": {},
    "rows": {"x": sk.Shard(0)},
    "columns": {"x": sk.Shard(1)},
    "partial": {"x": sk.Partial()},
}
cost = {
    (src, dst): sk.plan_reshard(
        (1024, 1024), "float32", places[src], places[dst], line
    ).bytes_per_device
    / 2**20
    for src in places
    for dst in places
}

# %%
table = [[cost[src, dst] for dst in places] for src in places]
fig, ax = plt.subplots(figsize=(5.2, 3.6), layout="constrained")
ax.imshow(table, cmap="YlOrBr", vmax=11)
for (src, dst), mib in cost.items():
    text = f"{mib:g}" if mib else "free"
    ax.text(list(places).index(dst), list(places).index(src), text, ha="center", va="center")
ax.set(title="MiB that one of 8 devices receives", xlabel="to", ylabel="from")
ax.set_xticks(range(4), list(places))
ax.set_yticks(range(4), list(places))
plt.show()

# %% [markdown]
# Five of these are worth remembering. With *n* devices and an array of *S* bytes (here MiB):

# %%
n, S = 8, 4
assert cost["copies", "rows"] == 0  # everyone already has it: cut, and forget the rest
assert cost["rows", "columns"] == S * (n - 1) / n**2  # all-to-all: cheap
assert cost["rows", "copies"] == S * (n - 1) / n  # all-gather: nearly the whole array
assert cost["partial", "rows"] == S * (n - 1) / n  # reduce-scatter: add up, keep a part
assert (
    cost["partial", "copies"] == 2 * S * (n - 1) / n
)  # all-reduce: add up and copy, twice as much

# %% [markdown]
# So if the sum of a Partial value is only needed in parts, asking for parts halves the bill. That is the whole idea
# behind sharded optimizers (notebook 3).
#
# ## Is that what really happens?
#
# A plan is a promise. `sk.collectives` reads the program that the compiler made, and counts there:

# %%
big = sk.shard_tensor(jnp.ones((1024, 1024)), {"x": sk.Shard(0)}, line)
report = sk.collectives(lambda big: sk.reshard(big, {"x": sk.Shard(1)}), big)
assert report.bytes() / 2**20 == cost["rows", "columns"]
report

# %% [markdown]
# The same number, from another source. All of shardkit's tests work that way: they compare values with one device, and
# what was promised with what was compiled.
#
# Next: [2. A convolution across devices](02_convolution.ipynb).
