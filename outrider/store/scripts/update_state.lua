-- ARGV: session TTL ms, fence, then field, value, ...
local refused = refusal(ARGV[2])
if refused then
  return refused
end
redis.call('HSET', KEYS[1], unpack(ARGV, 3))
refresh(ARGV[1])
return {'OK'}
