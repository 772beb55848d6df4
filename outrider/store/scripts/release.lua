-- ARGV: session TTL ms, fence. The number stays, so that the next owner's is larger.
local refused = refusal(ARGV[2])
if refused then
  return refused
end
redis.call('HSET', KEYS[1], 'lease.owner', '', 'lease.expires_ms', '0')
-- The server keeps up to as much room again behind a string that grows; an idle session, of which there are many, gives
-- it back by being written anew.
for i = 2, 4 do
  local content = redis.call('GET', KEYS[i])
  if content then
    redis.call('SET', KEYS[i], content)
  end
end
refresh(ARGV[1])
return {'OK'}
