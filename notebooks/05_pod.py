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
# # 5. Plan a pod from a laptop
#
# Will it fit? What will travel? How should the mesh look? Usually one finds out on the machine, when the clock is
# running. But compilers need no hardware: those for TPUs and for GPUs run on a laptop, and what they say of memory and
# collectives is what they would say there. This notebook asks them.

# %%
# The CPU plays eight devices, whatever else is here; this must be said before JAX is used for the first time.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import json

import jax.numpy as jnp
import matplotlib.pyplot as plt

import shardkit as sk

# %% [markdown]
# ## The job
#
# The larger half of a transformer: six layers that widen 8192 features to 32768 and narrow them again, 8192 tokens,
# and a step of gradient descent with momentum. Parameters are bfloat16, their momentum is float32.


# %%
def step(params, momentum, x):
    def loss(params):
        h = x
        for layer in params:
            h = h + jax.nn.relu(h @ layer["up"]) @ layer["down"]
        return jnp.mean(h.astype(jnp.float32) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return (
        jax.tree.map(lambda p, m: p - (0.01 * m).astype(p.dtype), params, momentum),
        momentum,
        value,
    )


job = jax.jit(step, donate_argnums=(0, 1))  # new parameters take the place of the old

# %% [markdown]
# Arguments are *described*: shape, dtype, and where they live. Nothing is allocated. Tokens are cut over `"dp"`; over
# `"tp"` the wide side of every layer is cut.

# %%
wide = {"up": ((8192, 32768), {"tp": sk.Shard(1)}), "down": ((32768, 8192), {"tp": sk.Shard(0)})}


def arguments(mesh):
    def described(shape, placements, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sk.to_named_sharding(placements, mesh))

    def layers(dtype):
        return [{name: described(*where, dtype) for name, where in wide.items()} for _ in range(6)]

    return (
        layers("bfloat16"),
        layers("float32"),
        described((8192, 8192), {"dp": sk.Shard(0)}, "bfloat16"),
    )


here = sk.make_mesh({"dp": 2, "tp": 4})
parameters = sum(p.size for p in jax.tree.leaves(arguments(here)[0]))
print(
    f"{parameters / 1e9:.2f} billion parameters: {parameters * 6 / 2**30:.0f} GiB with their momentum"
)
assert parameters == 6 * 2 * 8192 * 32768
sk.show(arguments(here)[0][0]["up"])

# %% [markdown]
# ## Ask the compiler that everyone has
#
# The compiler for CPUs is always here, and eight simulated devices do for a first look. `sk.explain` compiles the step,
# runs nothing, and says what it found: each collective, and what it is for.

# %%
sk.explain(job, *arguments(here))

# %% [markdown]
# ## Ask for eight GPUs
#
# `sk.target_mesh` makes a mesh of devices that aren't here: eight H100, say. The compilers come with the extras
# `gpu-target` and `tpu-target`. Where one isn't installed, this notebook says so and takes the figures it gave when
# the notebook was written (`05_pod.json`).

# %%
with open("05_pod.json") as file:
    stored = json.load(file)
measured = {}


def ask(target, axes):
    """What a target's compiler says of the step."""
    key = f"{target} " + " ".join(f"{name}={size}" for name, size in axes.items())
    try:
        mesh = sk.target_mesh(target, axes)
    except ImportError as missing:
        print(f"{key}: taken from 05_pod.json, for {missing}")
        return stored[key]
    page = sk.explain(job, *arguments(mesh)).to_dict()
    measured[key] = {
        "gib": page["memory"]
        and round(page["memory"]["in_use"] / 2**30, 1),  # None: it was refused
        "capacity_gib": page["capacity"] / 2**30,
        "mib": {
            name: round(found["bytes_per_device"] / 2**20)
            for name, found in page["purposes"].items()
        },
        "ms": {
            name: seconds and round(1e3 * seconds, 1)
            for name, seconds in page["estimate"].items()
            if name in ("compute", "memory", "communication")
        },
    }
    return measured[key]


# %%
meshes = [{"dp": 8, "tp": 1}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 1, "tp": 8}]
gpu = {f"dp={m['dp']}, tp={m['tp']}": ask("gpu:h100:8", m) for m in meshes}


# %% [markdown]
# Four shapes of the mesh, and for each what one card receives in a step, and what it needs to hold:


# %%
def bare(ax, title, largest):
    ax.set(title=title, xlim=(0, 1.25 * largest), xticks=[])
    ax.spines[["top", "right", "bottom"]].set_visible(False)


fig, (wire, memory) = plt.subplots(1, 2, figsize=(9, 2.8), sharey=True, layout="constrained")
left = [0.0] * 4
for purpose, color in (("gradient reduction", "#e08a4f"), ("reduction", "#f2c9a8")):
    width = [answer["mib"].get(purpose, 0) / 1024 for answer in gpu.values()]
    label = "of gradients" if purpose == "gradient reduction" else "of activations"
    bars = wire.barh(list(gpu), width, left=left, color=color, label=label)
    left = [a + b for a, b in zip(left, width, strict=True)]
wire.bar_label(bars, [f"{total:.1f}" for total in left], padding=4)
bare(wire, "GiB received, for sums", max(left))
wire.invert_yaxis()
fig.legend(loc="outside lower left", ncols=2, frameon=False)
gib = [answer["gib"] for answer in gpu.values()]
memory.bar_label(memory.barh(list(gpu), gib, color="#0b5f70"), fmt="%.1f", padding=4)
bare(memory, "GiB in use", max(gib))
plt.show()

# %% [markdown]
# All fit into the 80 GiB of an H100. Whole copies of the model (`dp=8`) are the dearest in both ways: every card
# receives sums of *all* gradients. The more the model is cut, the less there is of those, and the more sums of
# activations there are instead. And the times? The data sheet's peak rates say what is the *least* that arithmetic and
# communication can take:

# %%
for name, answer in gpu.items():
    ms = answer["ms"]
    print(f"{name}: compute {ms['compute']} ms, communication {ms['communication']} ms")
total = [sum(answer["mib"].values()) for answer in gpu.values()]
assert all(answer["gib"] < 80 for answer in gpu.values())
assert total[0] == max(total) and gib[0] == max(gib)

# %% [markdown]
# ## Ask for eight TPUs
#
# A TPU v5e has 16 GiB, so the first row won't do there. Its own compiler says so, too, without having been near one:

# %%
copies = ask("tpu:v5e:2x4", {"dp": 8, "tp": 1})
cut = ask("tpu:v5e:2x4", {"dp": 2, "tp": 4})
for name, answer in (("dp=8, tp=1", copies), ("dp=2, tp=4", cut)):
    verdict = "is refused" if answer["gib"] is None else f"needs {answer['gib']} GiB"
    print(f"{name} {verdict} ({answer['capacity_gib']:.0f} GiB a chip)")
assert copies["gib"] is None and cut["gib"] < 16

# %% [markdown]
# The meshes are chosen, and nothing has been rented. In a project of your own, `python -m shardkit explain job.py:job
# --mesh dp=2,tp=4 --target gpu:h100:8` prints such a page, and with `--strict` it fails in CI when a change makes
# something travel that nothing asks for.
#
# That was the last notebook. The scripts in [examples](../examples) do whole jobs.
