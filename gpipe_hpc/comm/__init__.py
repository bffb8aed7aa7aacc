"""Communication between ranks: launch, groups, transports, collectives, failure detection."""
