"""Routers that act inside an encoder's network: their settings, their weights and their passes."""
