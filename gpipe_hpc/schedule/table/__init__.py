"""The schedule table: actions in rows, data flow, execution order, lifetimes and text form."""
