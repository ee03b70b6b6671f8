"""flax.linen layers that know of meshes."""
