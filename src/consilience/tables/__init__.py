"""Tables of records: the public facts about them, reading, encoding, chunks."""
