"""How ranks reach one another: interfaces, ports, connections and groups."""
