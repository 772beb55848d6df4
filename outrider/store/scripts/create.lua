-- ARGV: session TTL ms, owner, lease ms, token ids, classes, then field, value, ... of the state.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return {'EXISTS'}
end
for i = 2, #KEYS do
  redis.call('DEL', KEYS[i])
end
redis.call('HSET', KEYS[1], unpack(ARGV, 6))
redis.call('SET', KEYS[2], ARGV[4])
redis.call('SET', KEYS[3], ARGV[5])
local reply = grant(ARGV[2], 1, ARGV[3])
refresh(ARGV[1])
return reply
