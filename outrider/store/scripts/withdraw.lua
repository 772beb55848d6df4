-- KEYS: index, descriptions. ARGV: worker id.
redis.call('HDEL', KEYS[2], ARGV[1])
return {'OK', redis.call('ZREM', KEYS[1], ARGV[1])}
