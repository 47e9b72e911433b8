"""The launchers `kubernetes` and `ray`."""
