"""What will go wrong on this machine, before it does: facts that it tells, and what follows from them."""
