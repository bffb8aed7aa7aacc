"""What a run works on and gives: batches cut into micro-batches, and put together again."""
