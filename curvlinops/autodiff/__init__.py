"""Derivatives of one evaluation of a model."""
