"""Devices: the only place that makes a mesh."""
