"""Rough adapters: just enough of six different systems to find out what the contract must hold."""
