"""What nnx and linen layers compute on a mesh: functions of arrays and a layer's settings, of neither framework."""
