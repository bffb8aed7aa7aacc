"""What a table is: actions in rows, the data flow, the order it imposes, its text form."""
