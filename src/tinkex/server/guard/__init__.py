"""What keeps one caller from costing the others: bounds on connections, bodies, keys and work."""
