"""Where the KV lives and how it moves: homes, link, pools."""
