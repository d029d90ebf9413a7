"""Plug-ins of trainers and inference engines."""
