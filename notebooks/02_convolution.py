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
# # 2. A convolution across devices
#
# An image that is too large for one device is cut into strips, one for each. A convolution mixes neighbouring pixels,
# so at every cut a device needs a few columns that its neighbour holds: its *halo*. This notebook draws the halos,
# shows what happens without them, and counts what they cost.

# %%
# The CPU plays eight devices, whatever else is here; this must be said before JAX is used for the first time.
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jax import lax

import shardkit as sk

# %% [markdown]
# ## An image in four strips
#
# A picture of rings, 96 x 192 pixels, its width cut over four devices. In JAX images have four dims: batch, height,
# width, channels (`NHWC`), so width is dim 2.

# %%
mesh = sk.make_mesh({"sp": 4})
rows, columns = np.mgrid[-1:1:96j, -2:2:192j]
rings = np.cos(18 * (rows**2 + columns**2)).astype(np.float32)
image = sk.shard_tensor(rings[None, :, :, None], {"sp": sk.Shard(2)}, mesh)


def strips(picture, title, **style):
    """Four strips side by side, as the devices hold them."""
    fig, axes = plt.subplots(1, 4, figsize=(5.4, 2.7), layout="constrained")
    for device, (ax, part) in enumerate(zip(axes, sk.to_local(picture), strict=True)):
        ax.imshow(part[0, :, :, 0], interpolation="nearest", **style)
        ax.set(title=f"device {device}", xticks=[], yticks=[])
    fig.suptitle(title)
    plt.show()


strips(image, "what each device holds", cmap="gray")

# %% [markdown]
# ## Without neighbours there are seams
#
# We blur with a kernel of 9 x 9. First naively: each device convolves its own strip (`sk.local_map` does just that),
# and takes zeros for what is beyond it. Compare with the same blur on one device:

# %%
kernel = np.full((9, 9, 1, 1), 1 / 81, np.float32)
numbers = ("NHWC", "HWIO", "NHWC")


def blur(x):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)


expected = blur(rings[None, :, :, None])
naive = sk.local_map(blur, {"sp": sk.Shard(2)}, {"sp": sk.Shard(2)}, mesh)(image)

# %%
fig, axes = plt.subplots(1, 2, figsize=(8, 2.4), layout="constrained")
for ax, picture, title in zip(axes, (naive, naive - expected), ("naive", "error"), strict=True):
    ax.imshow(
        picture[0, :, :, 0],
        cmap="gray" if title == "naive" else "RdBu",
        vmin=-0.8,
        vmax=0.8,
        interpolation="nearest",
    )
    ax.set(title=title, xticks=[], yticks=[])
plt.show()
wrong = np.flatnonzero(np.abs(np.asarray(naive - expected)).max((0, 1, 3)) > 1e-5)
print("wrong columns:", wrong)
assert set(wrong) == {cut + i for cut in (48, 96, 144) for i in range(-4, 4)}

# %% [markdown]
# Four columns on either side of each cut are wrong: the radius of the kernel.
#
# ## With halos there are none
#
# `sk.ring_conv` takes the arguments of JAX's own convolution, and which mesh axis cuts which dim. Before it convolves,
# every device gets the columns it lacks from its neighbours.


# %%
def ring_blur(x, kernel=kernel):
    return sk.ring_conv(
        x, kernel, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes={"sp": "W"}, mesh=mesh
    )


blurred = ring_blur(image)
np.testing.assert_allclose(blurred, expected, atol=1e-6)
strips(blurred, "blurred, still in strips", cmap="gray", vmin=-0.8, vmax=0.8)

# %% [markdown]
# Which columns are these? `sk.show` draws them, if it is told the kernel: the hatched margins come from the neighbours.

# %%
sk.show(image, halo={2: {"kernel": 9, "padding": "SAME"}})

# %% [markdown]
# And here they are in the picture: in colour what a device receives, in gray what it has.


# %%
def with_halos(part, left, right):
    """A strip in gray, with its neighbours' columns in orange."""
    gray = np.concatenate([left, part, right], axis=1)[:, :, None] / 2 + 0.5
    received = np.ones(gray.shape[1], bool)
    received[left.shape[1] : left.shape[1] + part.shape[1]] = False
    return np.where(received[None, :, None], gray * [1, 0.6, 0.2], gray * [1, 1, 1])


fig, axes = plt.subplots(1, 4, figsize=(5.8, 2.5), layout="constrained")
for i, ax in enumerate(axes):
    begin, end = 48 * i, 48 * (i + 1)
    left, right = rings[:, max(begin - 4, 0) : begin], rings[:, end : end + 4]
    ax.imshow(with_halos(rings[:, begin:end], left, right), interpolation="nearest")
    ax.set(title=f"device {i}", xticks=[], yticks=[])
plt.show()

# %% [markdown]
# ## What it costs
#
# The compiled program has two permutes, one for each direction, of four columns each: 96 pixels x 4 columns x 4 bytes.
# Nothing else travels.

# %%
report = sk.collectives(ring_blur, image)
assert report.by_kind() == {"collective_permute": 2}
assert report.bytes() == 2 * 96 * 4 * 4
report

# %% [markdown]
# So the price depends on the kernel and the height of the image, not on its width; fetching the rest of the image
# would depend on the width:

# %%
sizes = [1, 3, 5, 9, 13, 17]
received = [
    sk.collectives(ring_blur, image, np.ones((k, k, 1, 1), np.float32)).bytes() / 1024
    for k in sizes
]
whole = image.nbytes * 3 / 4 / 1024  # the three strips that others hold
assert received == [96 * (k - 1) * 4 / 1024 for k in sizes]

fig, ax = plt.subplots(figsize=(6, 2.6), layout="constrained")
ax.plot(sizes, received, "o-", color="#0b5f70")
ax.axhline(whole, color="#e08a4f")
ax.text(1, whole - 2, "the rest of the image", color="#a3541c", va="top")
ax.text(13, 7, "halos", color="#0b5f70")
ax.set(xlabel="width of the kernel", ylabel="KiB a device receives", xticks=sizes, ylim=(0, 62))
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Does the compiler not do that by itself?
#
# For plain convolutions it does. For others it puts the whole image together on every device. A convolution in groups
# (each group of channels has its own kernels) is such a case: below, 16 channels in one group and in four, by JAX
# alone, and in four by `sk.ring_conv`. Arguments and placements are the same.

# %%
channels = sk.shard_tensor(np.ones((2, 96, 192, 16), np.float32), {"sp": sk.Shard(2)}, mesh)
dims = {"padding": "SAME", "dimension_numbers": numbers}


def plain(x, kernel):
    groups = x.shape[3] // kernel.shape[2]
    return lax.conv_general_dilated(x, kernel, (1, 1), **dims, feature_group_count=groups)


def ring(x, kernel):
    groups = x.shape[3] // kernel.shape[2]
    where = {"spatial_axes": {"sp": "W"}, "mesh": mesh}
    return sk.ring_conv(x, kernel, (1, 1), **dims, feature_group_count=groups, **where)


one, four = np.ones((3, 3, 16, 16), np.float32), np.ones((3, 3, 4, 16), np.float32)
np.testing.assert_allclose(ring(channels, four), plain(channels, four), rtol=1e-5)
found = {
    "JAX, one group": sk.collectives(plain, channels, one),
    "JAX, four groups": sk.collectives(plain, channels, four),
    "ring_conv, four groups": sk.collectives(ring, channels, four),
}
assert [report.count("all_gather") for report in found.values()] == [0, 1, 0]

# %%
kib = [report.bytes() / 1024 for report in found.values()]
fig, ax = plt.subplots(figsize=(6.4, 1.8), layout="constrained")
bars = ax.barh(list(found), kib, color=["#e08a4f", "#e08a4f", "#0b5f70"])
ax.bar_label(bars, [f"{k:,.0f} KiB" for k in kib], padding=4)
ax.set(title="one device receives", xlim=(0, 1.2 * max(kib)), xticks=[])
ax.invert_yaxis()
ax.spines[["top", "right", "bottom"]].set_visible(False)
plt.show()

# %% [markdown]
# ## Gradients, and cuts in two directions
#
# The way back through a halo exchange is the exchange in reverse: what a neighbour made of my columns is added to my
# gradient. JAX's `grad` works, and the numbers are those of one device.

# %%
gradient = jax.grad(lambda x: jnp.sum(ring_blur(x) ** 2))(image)
alone = jax.grad(lambda x: jnp.sum(blur(x) ** 2))(rings[None, :, :, None])
np.testing.assert_allclose(gradient, alone, atol=1e-5)

# %% [markdown]
# Height can be cut as well. Then there are corners, which belong to the device diagonally across:

# %%
grid = sk.make_mesh({"h": 2, "w": 4})
tiles = sk.shard_tensor(rings[None, :, :, None], {"h": sk.Shard(1), "w": sk.Shard(2)}, grid)
axes = {"h": "H", "w": "W"}
both = sk.ring_conv(
    tiles, kernel, (1, 1), "SAME", dimension_numbers=numbers, spatial_axes=axes, mesh=grid
)
np.testing.assert_allclose(both, expected, atol=1e-6)
one_dim = {"kernel": 9, "padding": "SAME"}
sk.show(tiles, halo={1: one_dim, 2: one_dim})

# %% [markdown]
# Strides, dilation, transposed convolutions, pooling and resizing work alike, and sizes that don't divide, too (see
# "A convolution across devices" in the README).
#
# Next: [3. Partial gradients, and one reduction a step](03_gradients.ipynb).
