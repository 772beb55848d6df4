-- KEYS: records, revocations. ARGV: key id. The first revocation stays.
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
  return {'NOT_FOUND'}
end
redis.call('HSETNX', KEYS[2], ARGV[1], integer(now_ms()))
return {'OK', redis.call('HGET', KEYS[2], ARGV[1])}
