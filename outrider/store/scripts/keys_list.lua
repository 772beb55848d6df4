-- KEYS: records, revocations. No ARGV.
return {'OK', redis.call('HGETALL', KEYS[1]), redis.call('HGETALL', KEYS[2])}
