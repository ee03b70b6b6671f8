"""Moving arrays between placements: which collectives (plan), and doing it (reshard).

From integers to arrays: ``factors`` (a mesh), ``states`` (where an array is), ``moves`` (one step and its cost),
``search`` (the cheapest way); ``regions`` and ``route`` bring layouts there, ``crossing`` between meshes; ``describe``
and ``plan`` say it; ``local`` does it on one device, ``linear`` on all, ``derivatives`` with derivatives;
``one_mesh`` and ``transfer`` take arrays, ``run`` is for users.
"""

from shardkit.reshard.describe import ReshardStep
from shardkit.reshard.place import shard_tensor
from shardkit.reshard.plan import ReshardPlan, plan_reshard
from shardkit.reshard.run import reshard, unshard

__all__ = ["ReshardPlan", "ReshardStep", "plan_reshard", "reshard", "shard_tensor", "unshard"]
