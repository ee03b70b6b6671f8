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
# # 3. Partial gradients, and one reduction a step
#
# To train faster, give each device a part of the batch. Every device then knows a *contribution* to the gradient, and
# the gradient is their mean. When is that mean taken, how often, and where does the result go? This notebook takes it
# once a step, and looks at what that saves.

# %%
# The CPU plays eight devices, whatever else is here; this must be said before JAX is used for the first time.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import shardkit as sk

# %% [markdown]
# ## A model that everyone knows
#
# A small network learns one period of a noisy sine. The batch has 512 points; the mesh has eight devices in a line.

# %%
mesh = sk.make_mesh({"dp": 8})
random = np.random.default_rng(0)
x = random.uniform(-3, 3, (512, 1)).astype(np.float32)
y = np.sin(x) + random.normal(0, 0.1, x.shape).astype(np.float32)
params = {
    "w1": random.normal(0, 1, (1, 64)).astype(np.float32),
    "b1": random.normal(0, 1, 64).astype(np.float32),
    "w2": random.normal(0, 0.1, (64, 1)).astype(np.float32),
}


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w1"] + params["b1"]) @ params["w2"] - y) ** 2)


# %% [markdown]
# ## Eight opinions
#
# `sk.value_and_grad` is JAX's, with the batch cut over a mesh axis. Its gradients come out `Partial`: each device keeps
# what its own 64 points say.

# %%
gradients = jax.jit(sk.value_and_grad(loss, batch_axes="dp", mesh=mesh))
value, partial = gradients(params, x, y)
sk.show(partial["b1"])

# %% [markdown]
# The devices don't agree, of course: they have seen different points. Here is what each says of the first 16 entries of
# `b1`. The mean of all is the gradient that one device alone would find.

# %%
opinions = np.stack(sk.to_local(partial["b1"]))
truth = jax.grad(loss)(params, x, y)["b1"]
np.testing.assert_allclose(opinions.mean(0), truth, atol=1e-6)
np.testing.assert_allclose(partial["b1"].reduce(), truth, atol=1e-6)

fig, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for opinion in opinions:
    ax.plot(opinion[:16], "o", color="#e08a4f", alpha=0.6, ms=4)
ax.plot(truth[:16], "_", color="#0b5f70", ms=16, mew=3)
ax.plot([], [], "o", color="#e08a4f", label="one device")
ax.plot([], [], "_", color="#0b5f70", ms=12, mew=3, label="the gradient")
ax.set(xlabel="entry of b1", ylabel="gradient", xticks=range(0, 16, 3))
ax.spines[["top", "right"]].set_visible(False)
fig.legend(frameon=False, loc="outside right upper")
plt.show()

# %% [markdown]
# ## One reduction for all of them
#
# The three parameters have three gradients. `sk.reduce_gradients` packs them into one array, which is reduced in a
# single collective. (The compiler lets the loss, one more number, travel along.)


# %%
@jax.jit
def reduced(params, x, y):
    value, partial = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh)(params, x, y)
    return value, sk.reduce_gradients(partial, "all_reduce", axis="dp")


report = sk.collectives(reduced, params, x, y)
assert report.count("all_reduce") == len(report) <= 2
report

# %% [markdown]
# ## Small batches in a loop
#
# When a batch doesn't fit, one takes it in slices and adds the gradients up. In plain JAX the natural code is a
# `lax.scan`, and the compiler reduces in *every* turn of it, because the sum that the loop carries is a plain array.
# With `microbatches=` the loop carries the Partial value, and the reduction waits until the end.


# %%
def plain(params, x, y, slices):
    def add(total, part):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, *part)), None

    cut = jax.P(None, "dp")
    parts = [a.reshape(8, slices, -1, 1).swapaxes(0, 1).reshape(slices, -1, 1) for a in (x, y)]
    parts = [jax.lax.with_sharding_constraint(a, jax.NamedSharding(mesh, cut)) for a in parts]
    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda g: g / slices, total)


def ours(params, x, y, slices):
    partial = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, microbatches=slices)(
        params, x, y
    )[1]
    return sk.reduce_gradients(partial, "all_reduce", axis="dp")


# %%
data = [sk.shard_tensor(a, {"dp": sk.Shard(0)}, mesh) for a in (x, y)]
counts = [1, 4, 16]
truth = jax.grad(loss)(params, x, y)
received = {}
for name, fun in (("plain JAX", plain), ("Partial", ours)):
    sums = jax.jit(fun, static_argnums=3)(params, *data, 4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), sums, truth)
    for m in counts:
        page = sk.explain(jax.jit(lambda *args, fun=fun, m=m: fun(*args, m)), params, *data)
        received[name, m] = page.bytes_per_device / 1024

# %%
fig, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
for name, color in (("plain JAX", "#e08a4f"), ("Partial", "#0b5f70")):
    ax.plot(counts, [received[name, m] for m in counts], "o-", color=color, label=name)
ax.set(xlabel="slices of the batch", ylabel="KiB a device receives", xticks=counts, ylim=0)
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
assert received["Partial", 16] == received["Partial", 1]
assert received["plain JAX", 16] == 16 * received["plain JAX", 1]

# %% [markdown]
# ## Who needs the whole sum?
#
# The optimizer works on every entry alone. So device 3 may take the sum of *its* eighth of the gradient, keep Adam's
# state of that eighth only, and share the updated parameters afterwards. That is `sk.shard_optimizer`; it takes any
# optimizer of optax. Stage 2 cuts state and gradients; the step looks as always.

# %%
params = {name: sk.shard_tensor(value, {}, mesh) for name, value in params.items()}
tx = sk.shard_optimizer(optax.adam(0.02), sk.ShardingStage2("dp"), mesh=mesh)
state = tx.init(params)


@jax.jit
def step(params, state, x, y):
    value, partial = sk.value_and_grad(loss, batch_axes="dp", mesh=mesh, microbatches=4)(
        params, x, y
    )
    updates, state = tx.update(partial, state, params)
    return optax.apply_updates(params, updates), state, value


sk.collectives(step, params, state, *data)

# %% [markdown]
# One reduce-scatter brings each device the sum it needs, one all-gather brings the updates back, and none of it is in
# the loop over the four slices. (The first row is the loss.) This is where Adam's running mean of `b1` lives:

# %%
sk.show(state.inner[0].mu["b1"])


# %%
def kept(tree):
    """Bytes on the first device."""
    leaves = [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    return sum(a.addressable_shards[0].data.nbytes for a in leaves)


alone = optax.adam(0.02).init(params)
print(f"Adam's state on one device: {kept(alone):,} bytes; cut over eight: {kept(state):,}")
assert kept(state) < kept(alone) / 7

# %% [markdown]
# ## And it learns the same
#
# Two hundred steps on eight devices, and two hundred on one, by the book:

# %%
single = jax.device_get(params)
single_state, losses = optax.adam(0.02).init(single), []


@jax.jit
def by_the_book(params, state, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    updates, state = optax.adam(0.02).update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


for _ in range(200):
    params, state, value = step(params, state, *data)
    single, single_state, expected = by_the_book(single, single_state, x, y)
    losses.append((float(expected), float(value)))
losses = np.array(losses)
np.testing.assert_allclose(losses[:, 1], losses[:, 0], rtol=2e-3)

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
left.semilogy(losses[:, 0], color="#e08a4f", lw=5, alpha=0.6, label="one device")
left.semilogy(losses[:, 1], color="#0b5f70", lw=1.5, label="eight")
left.set(xlabel="step", title="loss")
left.legend(frameon=False)
grid = np.linspace(-3, 3, 200, dtype=np.float32)[:, None]
fitted = jax.device_get(params)
right.plot(x[:, 0], y[:, 0], ".", color="#bbbbbb", ms=3)
right.plot(grid, np.tanh(grid @ fitted["w1"] + fitted["b1"]) @ fitted["w2"], color="#0b5f70", lw=2)
right.set(title="what it learned")
for ax in (left, right):
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Next: [4. Partition a program, and read it](04_programs.ipynb).
