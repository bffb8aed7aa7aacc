"""The schedule table: action lists (rows) of ranks, data flow, execution order and text form."""
