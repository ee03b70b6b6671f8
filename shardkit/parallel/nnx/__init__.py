"""flax.nnx layers that know of meshes."""
