"""The kinds of home that ``StorageConfig.home`` names: what each takes, opens and will hold."""
