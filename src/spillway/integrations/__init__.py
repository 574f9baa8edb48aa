"""Trainers and other libraries under Spillway, one file each."""
