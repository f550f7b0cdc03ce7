"""Local SGD and DiLoCo: inner steps, outer steps, schedule."""
