"""What people read: safe on a terminal, without credentials, in readable units."""
