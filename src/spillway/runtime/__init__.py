"""The runtime moves bytes. It knows nothing of autograd."""
