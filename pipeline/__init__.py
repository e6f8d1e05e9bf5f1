"""Runs the stages; knows nothing about language models."""
