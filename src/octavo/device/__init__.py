"""Devices: what this machine has and which kernels fit."""
