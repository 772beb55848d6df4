-- Delete a block that nobody can use. KEYS: index, block. ARGV: name in the index. Returns 1 if it was there.

redis.call('ZREM', KEYS[1], ARGV[1])
return redis.call('UNLINK', KEYS[2])
