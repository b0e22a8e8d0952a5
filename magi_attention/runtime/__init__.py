"""What runs on every rank: distributed attention, dispatch, roll, losses. Executes plans; never makes them."""
