-- KEYS: records, revocations. ARGV: key id.
return {'OK', redis.call('HGET', KEYS[1], ARGV[1]), redis.call('HGET', KEYS[2], ARGV[1])}
