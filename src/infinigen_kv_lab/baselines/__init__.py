"""The policies that InfiniGen is compared with, one file each."""
